"""Parsing of /generate's answers, each checked against its request before use. Imports no torch.

A server's bytes are input from outside: a wrong answer must cost one sample and be named, never poison a batch.
The answer's shape is SGLang 0.5.20's, read with --skip-tokenizer-init: output_ids ends with the stop token.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from dataclasses import dataclass
from typing import Any, NoReturn

from mega_rl.rollout.sglang.generation.samples import RequestFailure, Sample

# log(softmax(x)) in fp32 rounds a probability of one to a few ulp (6e-8 each) above it.
LOGPROB_ROUNDING = 1e-5


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
    answer = _object(_decode(body, expected), "the answer")
    meta = _object(answer.get("meta_info"), "meta_info")
    if meta.get("id") != expected.rid:
        _bad("wrong_id", f"meta_info.id is {_shown(meta.get('id'))}, not {expected.rid}")
    finish = _finish(meta)
    # A request that is aborted while it waits for its turn is answered without the count.
    if (finish != "partial" or "prompt_tokens" in meta) and meta.get("prompt_tokens") != expected.prompt_tokens:
        _bad("wrong_prompt", f"prompt_tokens is {_shown(meta.get('prompt_tokens'))}, not {expected.prompt_tokens}")
    tokens = _tokens(answer, meta, expected)
    logprobs = _logprobs(meta, tokens, aborted=finish == "partial")
    _check_end(finish, tokens, expected)
    versions = _versions(meta, len(tokens), expected)
    routing = _routing(meta, len(tokens), expected) if expected.routing and finish != "partial" else b""
    return Sample(tokens, logprobs, versions, finish, routing)


def _bad(kind: str, message: str) -> NoReturn:
    raise RequestFailure(kind, message)


def _shown(value: object) -> str:
    """Return at most 60 characters of a received value, for a message."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _decode(body: bytes, expected: ExpectedAnswer) -> Any:
    if len(body) > expected.max_bytes:
        _bad("too_large", f"more than {expected.max_bytes} bytes")
    try:
        return json.loads(body)
    except json.JSONDecodeError as error:
        # JSON that was cut fails to parse at its very end, or where the unterminated string begins.
        cut = error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated string")
        _bad("cut_json" if cut else "bad_json", f"{error.msg} at character {error.pos} of {len(error.doc)}")
    except (ValueError, RecursionError) as error:  # no UTF-8, a number of thousands of digits, a thousand brackets
        _bad("bad_json", f"{type(error).__name__}: {_shown(str(error))}")


def _object(value: Any, name: str) -> dict[str, Any]:
    if isinstance(value, list):
        _bad("wrong_count", f"{name} is a list of {len(value)}; one was asked for")
    if not isinstance(value, dict):
        _bad("not_an_object", f"{name} is {_shown(value)}")
    return value


def _is_int(value: object) -> bool:
    return type(value) is int  # JSON's true is a bool, and so an int to isinstance


def _finish(meta: dict[str, Any]) -> Any:
    reason = meta.get("finish_reason")
    if reason is None:
        _bad("missing_finish", "meta_info has no finish_reason")
    kind = reason.get("type") if isinstance(reason, dict) else reason
    if kind not in ("stop", "length", "abort"):
        _bad("unknown_finish", f"finish_reason is {_shown(reason)}")
    return "partial" if kind == "abort" else kind


def _tokens(answer: dict[str, Any], meta: dict[str, Any], expected: ExpectedAnswer) -> list[int]:
    if "output_ids" not in answer:
        _bad("missing_output_ids", f"the answer has {_shown(sorted(answer))}")
    tokens = answer["output_ids"]
    if not isinstance(tokens, list) or not all(_is_int(token) for token in tokens):
        _bad("bad_output_ids", f"output_ids is {_shown(tokens)}")
    foreign = next((token for token in tokens if not 0 <= token < expected.vocab_size), None)
    if foreign is not None:
        _bad("token_out_of_vocabulary", f"token {_shown(foreign)}; the vocabulary has {expected.vocab_size}")
    if len(tokens) > expected.max_new_tokens:
        _bad("too_many_tokens", f"{len(tokens)} tokens, {expected.max_new_tokens} asked for")
    if meta.get("completion_tokens") != len(tokens):
        _bad("token_count", f"completion_tokens is {_shown(meta.get('completion_tokens'))}, not {len(tokens)}")
    return tokens


def _logprobs(meta: dict[str, Any], tokens: list[int], *, aborted: bool) -> list[float]:
    if meta.get("output_token_logprobs") is None:
        if aborted and not tokens:
            return []  # nothing had been sampled
        _bad("missing_logprobs", "meta_info has no output_token_logprobs")
    entries = meta["output_token_logprobs"]
    if not isinstance(entries, list):
        _bad("bad_logprobs", f"output_token_logprobs is {_shown(entries)}")
    if len(entries) != len(tokens):
        _bad("logprob_count", f"{len(entries)} log-probs of {len(tokens)} tokens")
    logprobs = []
    for position, (entry, token) in enumerate(zip(entries, tokens, strict=True)):
        if not isinstance(entry, list) or len(entry) < 2 or not _is_int(entry[1]):
            _bad("bad_logprobs", f"log-prob {position} is {_shown(entry)}")
        if entry[1] != token:
            _bad("logprob_token", f"log-prob {position} is of token {_shown(entry[1])}, output_ids has {token}")
        logprobs.append(_logprob(entry[0], position))
    return logprobs


def _logprob(value: Any, position: int) -> float:
    if value is not None and not _is_int(value) and not isinstance(value, float):
        _bad("bad_logprobs", f"log-prob {position} is {_shown(value)}")
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        _bad("non_finite_logprob", f"log-prob {position} is {value}")
    if value > LOGPROB_ROUNDING:
        _bad("positive_logprob", f"log-prob {position} is {_shown(value)}")
    if value < -1e30:  # a whole number may be beyond any float; fp32 ends at 3.4e38
        _bad("non_finite_logprob", f"log-prob {position} is {_shown(value)}")
    return float(value)


def _check_end(finish: str, tokens: list[int], expected: ExpectedAnswer) -> None:
    if finish == "partial":
        body = tokens
    elif not tokens:
        _bad("empty_response", f"finish_reason is {finish}, and there is no token")
    else:
        body = tokens[:-1]
    position = next((i for i, token in enumerate(body) if token in expected.stop_token_ids), None)
    if position is not None and position < len(tokens) - 1:
        _bad("token_after_stop", f"token {position} of {len(tokens)} is the stop token {tokens[position]}")
    if finish == "stop" and tokens[-1] not in expected.stop_token_ids:
        _bad("no_stop_token", f"ends with {tokens[-1]}, the stop tokens are {sorted(expected.stop_token_ids)}")
    if finish == "length" and tokens[-1] in expected.stop_token_ids:
        _bad("unknown_finish", f"finish_reason is length, and the last token {tokens[-1]} is a stop token")
    if finish == "length" and len(tokens) < expected.max_new_tokens:
        _bad(
            "short_length",
            f"ended for its length after {len(tokens)} of {expected.max_new_tokens} tokens: is the server's context "
            f"shorter than the {expected.prompt_tokens} + {expected.max_new_tokens} that the run needs?",
        )


def _versions(meta: dict[str, Any], num_tokens: int, expected: ExpectedAnswer) -> list[int]:
    if "weight_versions" not in meta:
        if expected.mixed_versions:
            _bad("bad_version_spans", "meta_info has no weight_versions, which partial rollouts need")
        return [_version(meta.get("weight_version"), expected)] * num_tokens
    spans = meta["weight_versions"]
    if not isinstance(spans, list) or not all(isinstance(span, dict) for span in spans):
        _bad("bad_version_spans", f"weight_versions is {_shown(spans)}")
    names = [span.get("version") for span in spans]
    if not expected.mixed_versions and any(name != names[0] for name in names):
        _bad("mixed_versions", f"weight_versions are {_shown(names)}")
    versions: list[int] = []
    for span in spans:
        start, end = span.get("start"), span.get("end")
        if not (_is_int(start) and _is_int(end)) or start != len(versions) or not start <= end <= num_tokens:
            _bad("bad_version_spans", f"{_shown(span)} after {len(versions)} of {num_tokens} tokens")
        version = _version(span.get("version"), expected)
        if versions and version < versions[-1]:
            _bad("bad_version_spans", f"version {version} after version {versions[-1]}")
        versions += [version] * (end - start)
    if len(versions) != num_tokens:
        _bad("bad_version_spans", f"weight_versions cover {len(versions)} of {num_tokens} tokens")
    last = _version(meta.get("weight_version"), expected)
    if versions and last < versions[-1]:
        _bad("bad_version_spans", f"weight_version is {last}, the last token's version {versions[-1]}")
    return versions


def _version(value: Any, expected: ExpectedAnswer) -> int:
    """Return a weight version as an integer; raise RequestFailure unless the request admits it."""
    if value is None:
        _bad("missing_version", "meta_info has no weight_version")
    if not isinstance(value, str) or not value.isascii() or not value.isdecimal() or len(value) > 18:
        _bad("wrong_version", f"weight_version is {_shown(value)}, which no weight update of this run has set")
    version = int(value)
    if version == expected.version or (expected.mixed_versions and version > expected.version):
        return version
    _bad("wrong_version", f"weight_version is {version}, {expected.version} was asked for")


def _routing(meta: dict[str, Any], num_tokens: int, expected: ExpectedAnswer) -> bytes:
    rows = expected.prompt_tokens + num_tokens - 1  # the last token was never an input
    text = meta.get("routed_experts")
    if not isinstance(text, str):
        _bad("bad_routing", f"meta_info.routed_experts is {_shown(text)}")
    try:
        routing = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        _bad("bad_routing", "meta_info.routed_experts is not base64")
    if not routing or len(routing) % (4 * rows):
        _bad("bad_routing", f"{len(routing)} bytes are not an int32 [{rows}, layers, experts]")
    return routing
