"""Sources of the log-probs before the update, which are compared with the rollout engine's."""

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
        """Check that the actor's updates call with the outputs of their forward before they change a weight."""
        ...

    def evaluate(self, rollout: Rollout) -> tuple[TokenOutputs, Metrics]:
        """Return (log-probs of the rollout's tokens before the update, metrics of their comparison)."""
        ...


@dataclass(frozen=True)
class RecomputedLogprobs:
    """A forward of the actor over the whole batch, compared at once."""

    actor: TokenModel
    guard: MismatchGuard
    inspect: Inspect | None = None

    def evaluate(self, rollout: Rollout) -> tuple[TokenOutputs, Metrics]:
        """Evaluate the actor and compare; raises RolloutMismatchError."""
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
        return self.guard

    def evaluate(self, rollout: Rollout) -> tuple[TokenOutputs, Metrics]:
        """Return the rollout engine's log-probs, which the update compares with its own."""
        return TokenOutputs(logprobs=rollout.rollout_logprobs), {}
