"""Parsing of /generate's answers, each checked against its request before use. Imports no torch.

A server's bytes are input from outside: a wrong answer must cost one sample and be named, never poison a batch.
The answer's shape is SGLang 0.5.20's, read with --skip-tokenizer-init: output_ids ends with the stop token.
"""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass
from typing import Any, NoReturn

from mega_rl.rollout.sglang.generation.samples import RequestFailure, Sample

# log(softmax(x)) in fp32 rounds a probability of one to a few ulp (6e-8 each) above it.
LOGPROB_ROUNDING = 1e-5
_LEAST_LOGPROB = -1e30  # fp32 ends at 3.4e38, and a whole number of JSON may be beyond any float


@dataclass(frozen=True)
class ExpectedAnswer:
    """Properties of a request that `parse_answer` checks the server's JSON against."""

    rid: str
    prompt_tokens: int  # with the tokens of a partial response that it continues
    max_new_tokens: int  # still to come
    stop_token_ids: frozenset[int]
    vocab_size: int
    version: int  # version of the weights
    mixed_versions: bool  # whether tokens may be of this version and later ones
    routing: bool

    @property
    def max_bytes(self) -> int:
        """Bound of the body, generous: 256 B for a token with its log-prob (60 are usual), 16 KiB for its routing."""
        total = 2**18 + 256 * self.max_new_tokens
        return total + 2**14 * (self.prompt_tokens + self.max_new_tokens) if self.routing else total


def parse_answer(body: bytes, expected: ExpectedAnswer) -> Sample:
    """Return the response in an answer; its finish is "stop", "length", or "partial" for an aborted request.

    A log-prob above 0 by LOGPROB_ROUNDING or less is kept as it came. Raises RequestFailure.
    """
    if len(body) > expected.max_bytes:
        _bad(f"more than {expected.max_bytes} bytes")
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError) as error:  # cut, no UTF-8, a number of thousands of digits, too deep
        _bad(f"{type(error).__name__} in its {len(body)} bytes: {_shown(str(error))}")
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(meta, dict):
        _bad(f"{_shown(answer)} is not an object with meta_info")
    if meta.get("id") != expected.rid:
        _bad(f"meta_info.id is {_shown(meta.get('id'))}, not {expected.rid}")
    finish = _finish(meta)
    # A request that is aborted while it waits for its turn is answered without the count.
    if (finish != "partial" or "prompt_tokens" in meta) and meta.get("prompt_tokens") != expected.prompt_tokens:
        _bad(f"prompt_tokens is {_shown(meta.get('prompt_tokens'))}, not {expected.prompt_tokens}")
    tokens = _tokens(answer, meta, expected)
    logprobs = _logprobs(meta, tokens, aborted=finish == "partial")
    _check_end(finish, tokens, expected)
    versions = _versions(meta, len(tokens), expected)
    routing = _routing(meta, len(tokens), expected) if expected.routing and finish != "partial" else b""
    return Sample(tokens, logprobs, versions, finish, routing)


def _bad(message: str) -> NoReturn:
    raise RequestFailure("bad_answer", message)


def _shown(value: object) -> str:
    """Return at most 60 characters of a received value, for a message."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _is_int(value: object) -> bool:
    return type(value) is int  # JSON's true is a bool, and so an int to isinstance


def _finish(meta: dict[str, Any]) -> Any:
    reason = meta.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, dict) else reason
    if kind not in ("stop", "length", "abort"):
        _bad(f"finish_reason is {_shown(reason)}")
    return "partial" if kind == "abort" else kind


def _tokens(answer: dict[str, Any], meta: dict[str, Any], expected: ExpectedAnswer) -> list[int]:
    tokens, most = answer.get("output_ids"), expected.max_new_tokens
    if not isinstance(tokens, list) or not all(_is_int(token) for token in tokens):
        _bad(f"output_ids is {_shown(tokens)}")
    foreign = next((token for token in tokens if not 0 <= token < expected.vocab_size), None)
    if foreign is not None:
        _bad(f"token {_shown(foreign)}; the vocabulary has {expected.vocab_size}")
    count = meta.get("completion_tokens")
    if len(tokens) > most or count != len(tokens):
        _bad(f"{len(tokens)} tokens, completion_tokens is {_shown(count)}, and {most} were asked for")
    return tokens


def _logprobs(meta: dict[str, Any], tokens: list[int], *, aborted: bool) -> list[float]:
    entries = meta.get("output_token_logprobs")
    if entries is None and aborted and not tokens:
        return []  # nothing had been sampled
    if not isinstance(entries, list) or len(entries) != len(tokens):
        _bad(f"output_token_logprobs of {len(tokens)} tokens is {_shown(entries)}")
    logprobs = []
    for position, (entry, token) in enumerate(zip(entries, tokens, strict=True)):
        if not isinstance(entry, list) or len(entry) < 2 or not _is_int(entry[1]) or entry[1] != token:
            _bad(f"log-prob {position} is {_shown(entry)}, and its token {token}")
        value = entry[0]
        # Of null, which SGLang writes for NaN, and of NaN itself, no comparison holds.
        is_number = _is_int(value) or isinstance(value, float)
        if not (is_number and _LEAST_LOGPROB <= value <= LOGPROB_ROUNDING):
            _bad(f"log-prob {position} is {_shown(value)}")
        logprobs.append(float(value))
    return logprobs


def _check_end(finish: str, tokens: list[int], expected: ExpectedAnswer) -> None:
    stops = [position for position, token in enumerate(tokens) if token in expected.stop_token_ids]
    if stops and stops[0] < len(tokens) - 1:
        _bad(f"token {stops[0]} of {len(tokens)} is the stop token {tokens[stops[0]]}")
    if finish == "partial":
        return
    if not tokens or (finish == "stop") != bool(stops):
        _bad(f"finish_reason is {finish} after {tokens[-1:]}, the stop tokens are {sorted(expected.stop_token_ids)}")
    if finish == "length" and len(tokens) < expected.max_new_tokens:
        _bad(
            f"ended for its length after {len(tokens)} of {expected.max_new_tokens} tokens: is the server's context "
            f"shorter than the {expected.prompt_tokens} + {expected.max_new_tokens} that the run needs?"
        )


def _versions(meta: dict[str, Any], num_tokens: int, expected: ExpectedAnswer) -> list[int]:
    if "weight_versions" not in meta and not expected.mixed_versions:
        return [_version(meta.get("weight_version"), expected)] * num_tokens
    spans = meta.get("weight_versions")
    if not isinstance(spans, list) or not all(isinstance(span, dict) for span in spans):
        _bad(f"weight_versions is {_shown(spans)}")
    if not expected.mixed_versions and any(span.get("version") != spans[0].get("version") for span in spans):
        _bad(f"weight_versions are {_shown(spans)}")
    versions: list[int] = []
    for span in spans:
        start, end = span.get("start"), span.get("end")
        if not (_is_int(start) and _is_int(end)) or start != len(versions) or not start <= end <= num_tokens:
            _bad(f"{_shown(span)} after {len(versions)} of {num_tokens} tokens")
        versions += [_version(span.get("version"), expected)] * (end - start)
    in_order = [*versions, _version(meta.get("weight_version"), expected)]
    if len(versions) != num_tokens or in_order != sorted(in_order):
        _bad(f"weight_versions of {num_tokens} tokens, at the end {in_order[-1]}, are {_shown(spans)}")
    return versions


def _version(value: Any, expected: ExpectedAnswer) -> int:
    """Return a weight version as an integer; raise RequestFailure unless the request admits it."""
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) <= 18:
        version = int(value)
        if version == expected.version or (expected.mixed_versions and version > expected.version):
            return version
    raise RequestFailure("other_weights", f"weight_version is {_shown(value)}, {expected.version} was asked for")


def _routing(meta: dict[str, Any], num_tokens: int, expected: ExpectedAnswer) -> bytes:
    rows = expected.prompt_tokens + num_tokens - 1  # the last token was never an input
    text = meta.get("routed_experts")
    try:
        routing = base64.b64decode(text, validate=True) if isinstance(text, str) else b""
    except (binascii.Error, ValueError):
        routing = b""
    if not routing or len(routing) % (4 * rows):
        _bad(f"meta_info.routed_experts is no int32 [{rows}, layers, experts] in base64: {_shown(text)}")
    return routing
