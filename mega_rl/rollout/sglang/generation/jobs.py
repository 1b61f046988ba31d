"""One sample on its way through a generation, and the rules of its tries. Imports no torch."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from mega_rl.rollout.sglang.generation.failures import RequestFailure
from mega_rl.rollout.sglang.generation.replicas import Replica
from mega_rl.rollout.sglang.generation.samples import Sample, SampleRequest, Sampling

_BACKOFF_S = 0.1  # before the second try; doubles
_MAX_BACKOFF_S = 5.0


@dataclass(frozen=True)
class Policy:
    """Retry policy and timeouts of a generation."""

    retries: int  # further tries of a sample after a bad answer
    request_timeout_s: float  # of a sample from its first try to its last
    stall_timeout_s: float  # without a token from a server that has requests, until it is checked; and of that check
    grace_s: float  # for an aborted request to answer with what it has
    mixed_versions: bool


@dataclass
class Job:
    """A sample in flight: its request, its tries and their outcomes."""

    request: SampleRequest
    partial: Sample = field(default_factory=Sample)
    tries: int = 0
    bad_answers: int = 0
    disruptions: int = 0  # tries that a server is to blame for
    expires: float = math.inf  # loop time
    not_before: float = 0.0  # loop time
    avoid: Replica | None = None
    evicted: RequestFailure | None = None  # why its try was cut short by us
    asked: Replica | None = None  # by its last try
    last_failure: str = ""  # of its last try, in words; empty while that runs

    def unanswered(self) -> str:
        """Return in words where its tries went without a whole answer."""
        if self.asked is None:
            return "no server had room for it"
        endpoint = self.asked.client.endpoint
        return self.last_failure or f"server {endpoint.index} at {endpoint.url} had not answered try {self.tries}"

    def backoff_s(self) -> float:
        """Return the seconds until the next try: 0.1, 0.2, 0.4 ... with a jitter of 0.5 to 1.5, fixed by the sample."""
        failed = self.bad_answers + self.disruptions
        jitter = random.Random(f"{self.request.key} {self.request.seed} {failed}").uniform(0.5, 1.5)
        return min(_MAX_BACKOFF_S, _BACKOFF_S * 2.0 ** (failed - 1)) * jitter


def is_whole(sample: Sample, request: SampleRequest, sampling: Sampling) -> bool:
    """Return whether a response is complete: of the full length, or ended by a stop token."""
    tokens = sample.token_ids
    return len(tokens) >= request.most(sampling) or (bool(tokens) and tokens[-1] in sampling.stop_token_ids)


def closed(sample: Sample, sampling: Sampling) -> Sample:
    """Return a complete response with its finish, "stop" or "length"."""
    stopped = sample.token_ids[-1] in sampling.stop_token_ids
    return Sample(sample.token_ids, sample.logprobs, sample.versions, "stop" if stopped else "length", sample.routing)
