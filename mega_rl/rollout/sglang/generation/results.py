"""Results, statistics and progress of a generation over several servers. Imports no torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from mega_rl.rollout.sglang.generation.samples import Failure, Key, Sample


class State(Enum):
    """State of a replica in the rotation."""

    READY = "ready"  # traffic, if it holds the asked version
    SUSPECT = "suspect"  # none until a real generation has succeeded there; then READY, else DOWN
    STALE = "stale"  # none until it has been sent the weights; `ServerRouter.mark_ready` says so
    DOWN = "down"  # none until it has been started again and sent the weights


@dataclass
class ReplicaStats:
    """Counts of one replica in one generation."""

    index: int  # of its endpoint
    state: State  # at the end
    reason: str  # why it is not READY; "" while it is
    requests: int = 0  # tries sent to it
    answers: int = 0  # good answers
    tokens: int = 0  # of good answers
    most_in_flight: int = 0


@dataclass
class Stats:
    """Counts and times of one generation."""

    requests: int = 0  # tries sent
    retries: int = 0  # of these, tries after the first of a sample
    tokens: int = 0  # that came in this generation; not those of partial responses it was given
    seconds: float = 0.0
    failed_tries: Counter[str] = field(default_factory=Counter)  # kind -> tries that failed so
    replicas: list[ReplicaStats] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass
class FleetResult:
    """Result of a generation: each requested key is in exactly one of samples, failures and unserved."""

    samples: dict[Key, Sample] = field(default_factory=dict)  # whole responses
    failures: dict[Key, Failure] = field(default_factory=dict)  # tried for the last time
    # Responses as far as they came (maybe not at all) when no replica was left or `Handle.interrupt` was called:
    # give them to the next generation.
    unserved: dict[Key, Sample] = field(default_factory=dict)
    stats: Stats = field(default_factory=Stats)
    interrupted: bool = False


@dataclass(frozen=True)
class Progress:
    """Progress of a generation."""

    done: int  # samples and failures
    total: int
    tokens: int  # that came so far
    tokens_per_second: float
    ended: bool = False  # the last report of a generation, which need not have done all
