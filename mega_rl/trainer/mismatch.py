"""Watching how far the rollout engine's log-probs are from the trainer's."""

from __future__ import annotations

from dataclasses import dataclass

from mega_rl.algorithms.mismatch import combine, logprob_mismatch
from mega_rl.errors import RunError
from mega_rl.protocols import Ranks
from mega_rl.types import Experience, Metrics, Rollout, TokenOutputs


class RolloutMismatchError(RunError):
    """The rollout engine and the trainer disagree about a token's probability: training on it would be wrong."""


@dataclass(frozen=True)
class MismatchGuard:
    """Compares every rollout token's two log-probs over `ranks`; stops the run beyond `limit` nats."""

    limit: float
    ranks: Ranks

    def __call__(self, rollout: Rollout | Experience, old: TokenOutputs) -> Metrics:
        """Largest and mean difference in nats, equal on all ranks.

        Raises:
            RolloutMismatchError: on all ranks, naming the worst token.
        """
        assert old.logprobs is not None
        own = logprob_mismatch(
            rollout.rollout_logprobs,
            old.logprobs,
            rollout.loss_mask,
            tokens=rollout.tokens,
            prompt_index=rollout.prompt_index,
            sample_index=rollout.sample_index,
        )
        overall = combine(self.ranks.sum(own.pack(rank=self.ranks.rank, size=self.ranks.size)))
        if overall.max > self.limit:
            raise RolloutMismatchError(
                f"trainer and rollout engine disagree by more than rollout.logprob_diff_limit={self.limit}: "
                f"{overall.describe_worst()}; check that both run the same weights and dtype before raising the limit"
            )
        return overall.metrics()
