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
        """Check that the step's first update calls with the outputs of their forward before they change a weight."""
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
class RolloutLogprobs:
    """The rollout engine's log-probs, without a forward of the batch.

    In steps of a single on-policy update they stand in until the loss takes those of its own forward; otherwise they
    are the old policy. `inspect` compares them with the first update's forward before it changes a weight.
    """

    inspect: Inspect | None

    def evaluate(self, rollout: Rollout) -> tuple[TokenOutputs, Metrics]:
        """Return the rollout engine's log-probs."""
        return TokenOutputs(logprobs=rollout.rollout_logprobs), {}
