"""HTTP client for generation on one SGLang server, in token ids. Imports no torch.

A server's bytes are input from outside: each answer is checked against its request, and a wrong one costs one sample.
Answers are SGLang 0.5.21's, read with --skip-tokenizer-init: output_ids ends with the stop token.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import httpx

from mega_rl.rollout.sglang.control import Endpoint
from mega_rl.rollout.sglang.generation.samples import (
    NUCLEUS_OF_ONE,
    RequestFailure,
    Sample,
    SampleRequest,
    Sampling,
    hidden_bias,
)
from mega_rl.untrusted import read_body

_CONNECT_S = 10.0
_ERROR_BYTES = 4096  # per refusal; a message shows the first 200 characters
STATUS_KINDS = {
    **dict.fromkeys((400, 413, 422), "rejected"),
    **dict.fromkeys((401, 403, 404, 405), "refused"),
    429: "overloaded",
}  # all others: "server_error"


class SglangClient:
    """One endpoint. All methods belong to the event loop that first called one.

    n samples of a prompt are n requests, each with its own `sampling_seed`: a sample then depends on its own seed only,
    whatever else is generated, and is retried, continued or given up by itself. The server's prefix cache computes the
    prompt once.
    """

    def __init__(self, endpoint: Endpoint, *, vocab_size: int, max_concurrency: int) -> None:
        self._vocab_size = vocab_size
        # Four connections more than requests in flight: an abort, a health check, a probe, a spare.
        # One connection, one answer: surplus bytes of a server are never read as the answer to another request, and no
        # request goes into a connection that the server is about to close. To connect costs less than a token.
        limits = httpx.Limits(max_connections=max_concurrency + 4, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(
            limits=limits,
            # Reading is bounded by each request's deadline as a whole: a limit per read would let a slow drip live.
            timeout=httpx.Timeout(None, connect=_CONNECT_S),
            trust_env=False,  # no proxy and no netrc: keys and tokens go to the server and nowhere else
            headers={"Accept-Encoding": "identity", "Content-Type": "application/json"},  # nothing to unpack, no bombs
        )
        self.move(endpoint)

    def move(self, endpoint: Endpoint) -> None:
        """Send requests to `endpoint` from now on: a restarted server has another port and other keys."""
        self.endpoint, self.name = endpoint, f"server {endpoint.index} at {endpoint.url}"
        self._http.base_url = endpoint.url

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def generate(
        self,
        request: SampleRequest,
        sampling: Sampling,
        *,
        rid: str,
        version: int,
        timeout_s: float,
        partial: Sample | None = None,
        mixed_versions: bool = False,
        grace_s: float = 0.0,
    ) -> Sample:
        """Return the sample; if the server aborted it, the tokens so far with finish "partial".

        The server continues `partial`, a response so far, with the tokens that an uninterrupted request would have
        had: SGLang seeds each position by itself. After `timeout_s` the client aborts the request and waits up to
        `grace_s` for the tokens it has.

        Raises RequestFailure, with the tokens that came before the time was up as its `partial`.
        """
        before = partial or Sample()
        to_come, context = request.most(sampling) - len(before.token_ids), [*request.prompt, *before.token_ids]
        body = {
            "rid": rid,
            "input_ids": context,
            "sampling_params": _sampling_params(sampling, seed=request.seed, max_new_tokens=to_come),
            "return_logprob": True,
            "extra_key": str(version),  # shares its prefix with requests of this version only
        }
        if sampling.return_routing:
            body["return_routed_experts"] = True
        if sampling.adapter:
            body["lora_path"] = sampling.adapter
        expected = ExpectedAnswer(
            rid=rid,
            prompt_tokens=len(context),
            max_new_tokens=to_come,
            stop_token_ids=frozenset(sampling.stop_token_ids),
            vocab_size=self._vocab_size,
            version=version,
            mixed_versions=mixed_versions,
            routing=sampling.return_routing,
        )
        where = f"{self.name}, sample {request.key}"
        answer = asyncio.ensure_future(self._answer(body, expected, where))
        try:
            if (await asyncio.wait({answer}, timeout=timeout_s))[0]:
                return _joined(before, answer.result())
            if grace_s > 0:  # without, closing the connection tells the server, which looks every few seconds
                await self.abort(rid, timeout_s=grace_s / 2)
                await asyncio.wait({answer}, timeout=grace_s / 2)
            got = answer.done() and answer.exception() is None
            so_far = _joined(before, answer.result()) if got else before
            raise RequestFailure("timeout", f"{where}: no answer in {timeout_s:.3g} s", partial=so_far)
        finally:
            if not answer.done():  # let it close its connection
                answer.cancel()
                await asyncio.wait({answer}, timeout=5.0)
            if answer.done() and not answer.cancelled():
                answer.exception()  # seen, so that asyncio does not log it

    async def abort(self, rid: str = "", *, timeout_s: float) -> None:
        """Ask the server to end request `rid`, all if empty; each answers with tokens so far.

        A request that has not reached its scheduler yet continues, and a server may not answer.
        """
        body = {"rid": rid} if rid else {"abort_all": True}
        with contextlib.suppress(RequestFailure):
            await self._within(timeout_s, "POST", "/abort_request", body, self.endpoint.keys.admin_key)

    async def check_alive(self, *, timeout_s: float) -> None:
        """Check that the server generates; /health would also answer with a dead scheduler.

        A busy server answers once any of its requests has a token, an idle one after generating one token. Raises
        RequestFailure.
        """
        await self._within(timeout_s, "GET", "/health_generate", None, self.endpoint.keys.api_key)

    async def probe(self, *, rid: str, version: int, mixed_versions: bool, timeout_s: float) -> None:
        """Generate one token through everything a sample goes through. Raises RequestFailure.

        It is drawn as samples are: next to a request that cuts off the distribution, as a greedy one does, SGLang draws
        other tokens of the same seeds.
        """
        sampling = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=1, stop_token_ids=())
        request = SampleRequest(key=(-1, -1), prompt=(0,), seed=0)
        sample = await self.generate(
            request, sampling, rid=rid, version=version, mixed_versions=mixed_versions, timeout_s=timeout_s
        )
        if sample.finish == "partial":
            raise RequestFailure("aborted", f"{self.name}: aborted a probe")

    async def _answer(self, body: Mapping[str, Any], expected: ExpectedAnswer, where: str) -> Sample:
        content = await self._send("POST", "/generate", body, self.endpoint.keys.api_key, expected.max_bytes, where)
        try:
            return parse_answer(content, expected)
        except RequestFailure as bad:
            shown = bad.message if not self.endpoint.keys.appear_in(content) else "(not shown: the answer holds a key)"
            raise RequestFailure(bad.kind, f"{where}: {shown}") from None

    async def _within(self, timeout_s: float, method: str, path: str, body: Mapping[str, Any] | None, key: str) -> None:
        where = f"{self.name}{path}"
        try:
            async with asyncio.timeout(timeout_s):
                await self._send(method, path, body, key, _ERROR_BYTES, where)
        except TimeoutError:
            raise RequestFailure("timeout", f"{where}: no answer in {timeout_s:.3g} s") from None

    async def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None, key: str, max_bytes: int, where: str
    ) -> bytes:
        """Return a 200 answer's body, at most `max_bytes` + one read; only connecting has a deadline."""
        content = b"" if body is None else json.dumps(body).encode()
        # Messages name only the type of the cause, and tracebacks leave it out: httpx's errors hold the request
        # with its key.
        try:
            async with self._http.stream(
                method, path, content=content, headers={"Authorization": f"Bearer {key}"}
            ) as response:
                status = response.status_code
                received = await read_body(response, max_bytes if status == 200 else _ERROR_BYTES)
        except httpx.HTTPError as error:
            refused = isinstance(error, httpx.ConnectError)
            raise RequestFailure("refused" if refused else "disconnected", f"{where}: {type(error).__name__}") from None
        if status != 200:
            text = "(not shown: it holds a key)" if self.endpoint.keys.appear_in(received) else repr(received[:200])
            raise RequestFailure(STATUS_KINDS.get(status, "server_error"), f"{where}: HTTP {status}: {text}")
        return received


def _sampling_params(sampling: Sampling, *, seed: int, max_new_tokens: int) -> dict[str, Any]:
    """Return the sampling parameters under SGLang's names.

    Greedy is a nucleus of one token: at temperature 0, and with top_k=1, SGLang gives log-probs at temperature 1.
    """
    shared = {
        "max_new_tokens": max_new_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
        # Also turns stop_token_ids off, so only where there are none: else a model's own end would still stop it.
        "ignore_eos": not sampling.stop_token_ids,
        "temperature": sampling.temperature,
        **hidden_bias(sampling.hidden_token_ids),
    }
    if sampling.greedy:
        return {**shared, "top_p": NUCLEUS_OF_ONE}
    return {**shared, "top_p": sampling.top_p, "top_k": sampling.top_k or -1, "sampling_seed": seed}


def _joined(before: Sample, new: Sample) -> Sample:
    """Return `before` continued by `new`; the routing of the last answer covers all tokens."""
    return Sample(
        before.token_ids + new.token_ids,
        before.logprobs + new.logprobs,
        before.versions + new.versions,
        new.finish,
        new.routing,
        before.kept + new.kept,
    )


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
    version: int  # version of the server's weights when it was asked
    mixed_versions: bool  # whether tokens may be of this version and later ones
    routing: bool

    @property
    def max_bytes(self) -> int:
        """Return a generous limit of the body: 256 B per token, with routing 16 KiB more."""
        total = 2**18 + 256 * self.max_new_tokens
        return total + 2**14 * (self.prompt_tokens + self.max_new_tokens) if self.routing else total


def parse_answer(body: bytes, expected: ExpectedAnswer) -> Sample:
    """Return an answer's response; its finish is "stop", "length", or "partial" for an aborted request.

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
    return Sample(tokens, logprobs, versions, finish, routing, [one > expected.version for one in versions])


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
        # No comparison holds for null, which SGLang writes for NaN, nor for NaN itself.
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
        _bad(f"meta_info.routed_experts is not int32 [{rows}, layers, experts] in base64: {_shown(text)}")
    return routing
