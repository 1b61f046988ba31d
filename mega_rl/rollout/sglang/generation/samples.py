"""Requests and samples, the records between engine, scheduler and client. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Key = tuple[int, int]  # (prompt_index, sample_index)


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters that all requests of a generation share."""

    temperature: float
    top_p: float
    top_k: int  # 0 keeps all tokens
    max_new_tokens: int  # of a response, unless its request has a limit of its own
    stop_token_ids: tuple[int, ...]  # sorted, the model's end-of-sequence ids among them
    hidden_token_ids: tuple[int, ...] = ()  # no response may hold them
    greedy: bool = False
    return_routing: bool = False


@dataclass(frozen=True)
class RoutedLayers:
    """Layers in which a server routes tokens to experts."""

    mixtures: tuple[bool, ...]  # of each layer whether it is a mixture; the others report nothing of use
    top_k: int  # experts of a token


@dataclass(frozen=True)
class SampleRequest:
    """One sample of one prompt."""

    key: Key
    prompt: tuple[int, ...]
    seed: int  # 0 .. 2**31 - 1, of this sample alone
    limit: int | None = None  # new tokens; None: Sampling.max_new_tokens

    def most(self, sampling: Sampling) -> int:
        """Return the most tokens of the whole response, what a partial one has already included."""
        return sampling.max_new_tokens if self.limit is None else self.limit


@dataclass
class Sample:
    """A response, whole or as far as it came. The three lists are of one length."""

    token_ids: list[int] = field(default_factory=list)  # with the stop token that ended it
    logprobs: list[float] = field(default_factory=list)  # at the sampling temperature, before top-k and top-p; finite
    versions: list[int] = field(default_factory=list)  # weight version that sampled each token
    finish: Literal["stop", "length", "partial"] = "partial"
    # int32 [prompt + response - 1, layers, experts per token], little-endian: the experts of each token but the last;
    # empty unless Sampling.return_routing, and while the response is partial.
    routing: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class Failure:
    """Reason why a sample has no response after all its tries."""

    kind: str  # one of failures.KINDS: "cut_json", "missing_logprobs", ...
    message: str  # names the server, the sample and what came
    tries: int
