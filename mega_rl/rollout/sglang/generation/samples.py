"""Records between engine, router and client: requests, samples, failures and results. Imports no torch."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from mega_rl.errors import UserError

Key = tuple[int, int]  # (prompt_index, sample_index)

NUCLEUS_OF_ONE = 1e-6  # a top_p so small that the nucleus is only the most likely token
_BACKOFF_S = 0.1  # before the second try; doubles
_MAX_BACKOFF_S = 5.0
_NEVER = -1e30  # added to a logit: probability 0; JSON has no infinity


def hidden_bias(token_ids: Sequence[int]) -> dict[str, dict[str, float]]:
    """Return SGLang's sampling parameter that gives tokens a probability of 0; none without tokens."""
    return {"logit_bias": {str(token): _NEVER for token in token_ids}} if token_ids else {}


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters that all requests of a generation share."""

    temperature: float
    top_p: float
    top_k: int  # 0 keeps all tokens
    max_new_tokens: int  # per response, unless its request has its own limit
    stop_token_ids: tuple[int, ...]  # sorted, with the model's end-of-sequence ids
    hidden_token_ids: tuple[int, ...] = ()  # no response may hold them
    greedy: bool = False
    return_routing: bool = False
    adapter: str = ""  # name at the servers; empty: their weights are the policy's


@dataclass(frozen=True)
class SampleRequest:
    """One sample of one prompt."""

    key: Key
    prompt: tuple[int, ...]
    seed: int  # 0 .. 2**31 - 1, of this sample only
    limit: int | None = None  # new tokens; None: Sampling.max_new_tokens

    def most(self, sampling: Sampling) -> int:
        """Return the most tokens of the whole response, including those of a partial one."""
        return sampling.max_new_tokens if self.limit is None else self.limit

    def check(self, vocab_size: int) -> None:
        """Raise UserError for a prompt that kills a server."""
        if not self.prompt or not all(0 <= token < vocab_size for token in self.prompt):
            raise UserError(
                f"prompt {self.key[0]} is empty or holds a token outside the model's {vocab_size} tokens; "
                "check that the tokenizer is the model's own"
            )


@dataclass
class Sample:
    """A response, whole or as far as it came. The lists have one length."""

    token_ids: list[int] = field(default_factory=list)  # with the stop token that ended it
    logprobs: list[float] = field(default_factory=list)  # at the sampling temperature, before top-k and top-p; finite
    versions: list[int] = field(default_factory=list)  # weight version that sampled each token
    finish: Literal["stop", "length", "partial"] = "partial"
    # int32 [prompt + response - 1, layers, experts per token], little-endian: the experts of each token but the last;
    # empty unless Sampling.return_routing, and while the response is partial.
    routing: bytes = field(default=b"", repr=False)
    # The KV cache of the token's prefix may be of older weights; or none.
    kept: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.kept = self.kept or [False] * len(self.token_ids)

    def is_whole(self, request: SampleRequest, sampling: Sampling) -> bool:
        """Return whether it has its full length or ends with a stop token."""
        tokens = self.token_ids
        return len(tokens) >= request.most(sampling) or (bool(tokens) and tokens[-1] in sampling.stop_token_ids)


Charge = Literal["sample", "server", "down", "stale", "busy"]

# Kind of a failed try -> budget that it counts against:
# "sample": it uses up one of the sample's tries.
# "server": no answer came; it counts against the server, and a sample has a bounded number of these too.
# "down": as "server", and no other request can do better there, so the server is suspected at once.
# "stale": as "server", and the server gets no request until it was sent the weights again.
# "busy": as "server", but the server is healthy; it gets no request for a moment.
KINDS: dict[str, Charge] = {
    "bad_answer": "sample",  # a 200 whose body is not an answer to the request
    "aborted": "sample",  # the server gave the request up without being asked to
    "rejected": "sample",  # 400, 413, 422: the server will never take this request
    "deadline": "sample",  # the generation's deadline came first
    "other_weights": "stale",  # an answer with another weight version, or none
    "refused": "down",  # no process listens, the key is wrong, or it is no SGLang server of the version in use
    "overloaded": "busy",  # 429
    "server_error": "server",  # any other status
    "disconnected": "server",  # no whole answer
    "timeout": "server",
    "stalled": "server",  # it stopped generating, whatever its /health says
    "server_down": "server",  # it was declared dead with the request in flight
}
NOT_RETRIED = ("rejected", "deadline")


class RequestFailure(Exception):
    """One try of one request failed. `kind` is in KINDS; the message never holds a key."""

    def __init__(self, kind: str, message: str, *, partial: Sample | None = None) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind, self.message = kind, message
        self.charge = KINDS[kind]
        self.partial = partial  # tokens that came nevertheless and are good


def backoff_s(request: SampleRequest, failed: int) -> float:
    """Return the seconds until the next try after failed ones: 0.1, 0.2, 0.4 ... with a jitter."""
    jitter = random.Random(f"{request.key} {request.seed} {failed}").uniform(0.5, 1.5)
    return min(_MAX_BACKOFF_S, _BACKOFF_S * 2.0 ** (failed - 1)) * jitter


class State(Enum):
    """State of a server in the rotation."""

    READY = "ready"  # traffic, if it holds the requested version
    SUSPECT = "suspect"  # none until a real generation has succeeded there; then READY, else DOWN
    UPDATING = "updating"  # none until the update's end, READY or DOWN; requests in flight continue over it
    STALE = "stale"  # none until it was sent the weights; `ServerRouter.mark` says so
    DOWN = "down"  # none until it was started again and sent the weights
    LEFT = "left"  # none, for good


@dataclass
class GenerationResult:
    """Counts of a generation; samples and failures are the answers to its requests."""

    interrupted: bool = False
    requests: int = 0  # tries sent
    retries: int = 0  # tries after the first of a sample
    tokens: int = 0  # received, without those of responses that continue
    seconds: float = 0.0
    failed_tries: Counter[str] = field(default_factory=Counter)  # kind -> number

    def add(self, later: GenerationResult) -> None:
        """Add the counts of another generation."""
        for name in ("requests", "retries", "tokens", "seconds", "failed_tries"):
            setattr(self, name, getattr(self, name) + getattr(later, name))
