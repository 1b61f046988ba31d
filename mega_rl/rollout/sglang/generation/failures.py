"""Kinds of request failures, each with what it counts against. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mega_rl.rollout.sglang.generation.samples import Sample


@dataclass(frozen=True)
class Kind:
    """One way in which a request fails."""

    # "sample": an answer came and it is bad, which uses up one of the sample's tries.
    # "server": no answer came, which counts against the server; the number of these per sample is bounded too.
    # "down": as "server", and no other request can do better there, so the server is suspected at once.
    # "stale": as "server", and it gets no request until it has been sent the weights again.
    # "busy": as "server", but it is healthy; it gets no request for a moment.
    charged: Literal["sample", "server", "down", "stale", "busy"]
    meaning: str
    retried: bool = True


KINDS: dict[str, Kind] = {
    # The body is no answer.
    "too_large": Kind("sample", "the body is larger than any answer to this request can be"),
    "cut_json": Kind("sample", "the body ends within a JSON value"),
    "bad_json": Kind("sample", "the body is not JSON, or nested too deep"),
    "wrong_count": Kind("sample", "a list instead of the one answer"),
    "not_an_object": Kind("sample", "the answer or its meta_info is not a JSON object"),
    # The answer is to something else.
    "wrong_id": Kind("sample", "the answer carries another request's id"),
    "wrong_prompt": Kind("sample", "the answer counts another number of prompt tokens"),
    # Tokens.
    "missing_output_ids": Kind("sample", "no output_ids"),
    "bad_output_ids": Kind("sample", "output_ids is not a list of whole numbers"),
    "token_out_of_vocabulary": Kind("sample", "a token that the vocabulary has not"),
    "too_many_tokens": Kind("sample", "more tokens than were asked for"),
    "empty_response": Kind("sample", "finished without a token"),
    "token_count": Kind("sample", "completion_tokens differs from the number of output_ids"),
    # Log-probs.
    "missing_logprobs": Kind("sample", "no output_token_logprobs"),
    "bad_logprobs": Kind("sample", "output_token_logprobs is not a list of [log-prob, token, text]"),
    "logprob_count": Kind("sample", "not as many log-probs as tokens"),
    "logprob_token": Kind("sample", "a log-prob of another token than was put out"),
    "non_finite_logprob": Kind("sample", "a log-prob that is NaN, infinite or null (SGLang writes NaN as null)"),
    "positive_logprob": Kind("sample", "a log-prob above 0 by more than rounding"),
    # The end.
    "missing_finish": Kind("sample", "no finish_reason"),
    "unknown_finish": Kind("sample", "finish_reason is none of stop, length and abort"),
    "aborted": Kind("sample", "the server gave the request up without being asked to"),
    "no_stop_token": Kind("sample", "finish_reason is stop, and the last token is no stop token"),
    "token_after_stop": Kind("sample", "tokens go on after a stop token"),
    "short_length": Kind("sample", "finish_reason is length before the asked length"),
    # Weights.
    "missing_version": Kind("stale", "no weight_version"),
    "wrong_version": Kind("stale", "sampled by weights of another version"),
    "mixed_versions": Kind("sample", "sampled by weights of several versions, which was not asked for"),
    "bad_version_spans": Kind("sample", "weight_versions do not tile the tokens in order"),
    # Routing.
    "bad_routing": Kind("sample", "routed_experts is missing or has not one row per token"),
    # The request was refused.
    "rejected": Kind("sample", "HTTP 400, 413 or 422: the server will never take this request", retried=False),
    "unauthorized": Kind("down", "HTTP 401 or 403: the server wants another key"),
    "not_found": Kind("down", "HTTP 404 or 405: this is no SGLang server of the version in use"),
    "overloaded": Kind("busy", "HTTP 429"),
    "server_error": Kind("server", "HTTP 500"),
    "unavailable": Kind("server", "HTTP 502, 503 or 504"),
    "unexpected_status": Kind("server", "any other HTTP status but 200"),
    # Nothing came.
    "refused": Kind("down", "no connection: no process listens"),
    "connect_timeout": Kind("server", "no connection in time"),
    "disconnected": Kind("server", "the connection ended before the answer did"),
    "protocol": Kind("server", "the answer is not HTTP"),
    "timeout": Kind("server", "no whole answer in time"),
    "stalled": Kind("server", "the server stopped to generate, whatever its pings say"),
    "server_down": Kind("server", "the server was declared dead with the request in flight"),
    # Of the whole generation.
    "deadline": Kind("sample", "the generation's deadline came first", retried=False),
}

STATUS_KINDS: dict[int, str] = {
    400: "rejected",
    413: "rejected",
    422: "rejected",
    401: "unauthorized",
    403: "unauthorized",
    404: "not_found",
    405: "not_found",
    429: "overloaded",
    500: "server_error",
    502: "unavailable",
    503: "unavailable",
    504: "unavailable",
}


class RequestFailure(Exception):
    """One try of one request failed. `kind` is in KINDS; the message never holds a key."""

    def __init__(self, kind: str, message: str, *, partial: Sample | None = None) -> None:
        assert kind in KINDS, f"{kind!r} is not in failures.KINDS"
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.what = message
        self.partial = partial  # tokens that came nevertheless and are good


class BadAnswer(RequestFailure):
    """An answer to a request that violates the protocol or does not match the request."""


class NoAnswer(RequestFailure):
    """A request without an answer: the transport failed, time ran out, or the server refused."""
