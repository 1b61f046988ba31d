"""Where the log-probs before the update come from, and when they are held against the rollout engine's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from mega_rl.protocols import Inspect, TokenModel
from mega_rl.trainer.mismatch import MismatchGuard
from mega_rl.types import Metrics, Rollout, TokenOutputs


class OldLogprobs(Protocol):
    """Source of the old log-probabilities of PPO's ratio."""

    @property
    def inspect(self) -> Inspect | None:
        """What the actor's updates call with their forward's outputs before they change a weight."""
        ...

    def evaluate(self, rollout: Rollout) -> tuple[TokenOutputs, Metrics]:
        """(log-probs of the rollout's tokens before the update, metrics of their comparison)."""
        ...


@dataclass(frozen=True)
class RecomputedLogprobs:
    """A forward of the actor over the whole batch, compared at once."""

    actor: TokenModel
    guard: MismatchGuard
    inspect: Inspect | None = None

    def evaluate(self, rollout: Rollout) -> tuple[TokenOutputs, Metrics]:
        """The actor's log-probs; raises RolloutMismatchError."""
        old = self.actor.evaluate(rollout)
        return old, self.guard(rollout, old)


@dataclass(frozen=True)
class UpdateLogprobs:
    """The update's own forward, for steps that make a single update: the weights are still those that sampled.

    Saves a forward of the batch. The rollout engine's log-probs stand in until the update compares its own with them,
    before it changes a weight.
    """

    guard: MismatchGuard

    @property
    def inspect(self) -> Inspect:
        """The guard; raises RolloutMismatchError."""
        return self.guard

    def evaluate(self, rollout: Rollout) -> tuple[TokenOutputs, Metrics]:
        """The rollout engine's log-probs, not compared yet."""
        return TokenOutputs(logprobs=rollout.rollout_logprobs), {}
