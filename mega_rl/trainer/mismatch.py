"""Guards on sampled tokens: rollout log-probs against the trainer's, and the age of weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from mega_rl.algorithms.mismatch import (
    IMPORTANCE_SIZE,
    SUMMARY_SIZE,
    LogprobMismatch,
    combine,
    importance_metrics,
    importance_summary,
    logprob_mismatch,
)
from mega_rl.config.schema.rollout import MismatchConfig
from mega_rl.errors import RunError
from mega_rl.parallel.agreement import raise_together
from mega_rl.protocols import Ranks
from mega_rl.trainer.rows import token_versions
from mega_rl.types import Experience, Metrics, Rollout, TokenOutputs


class RolloutMismatchError(RunError):
    """The rollout engine and the trainer disagree about a token's probability."""


class StaleSampleError(RunError):
    """A sample of weights that are too old, or that the trainer never had."""


@dataclass(frozen=True)
class MismatchLimits:
    """Limits of |trainer - rollout| over a batch's tokens, in nats."""

    mean: float
    share: float  # tokens that differ by 1 nat or more, as a share of all
    max: float  # infinite: only a difference that is not finite is too large

    def exceeded(self, mismatch: LogprobMismatch) -> str | None:
        """Return which limit the tokens are beyond, with setting and value, or None."""
        if mismatch.max == inf:
            return "a log-prob is not finite"
        share = mismatch.share_of_large
        for words, value, limit, name in (
            (f"a token differs by {mismatch.max:.6g} nats", mismatch.max, self.max, "max"),
            (f"the mean differs by {mismatch.mean:.6g} nats", mismatch.mean, self.mean, "mean"),
            (f"a share of {share:.3g} of the tokens differs by 1 nat or more", share, self.share, "share"),
        ):
            if value > limit:
                return f"{words}, beyond rollout.mismatch.{name}_limit={limit:g}"
        return None


def usual_limits(settings: MismatchConfig, *, in_fp32: bool) -> MismatchLimits:
    """Return the limits of the settings; 0 allows for rounding. in_fp32: trainer and rollouts are."""
    mean, largest = (1e-3, 1.0) if in_fp32 else (0.15, inf)
    return MismatchLimits(settings.mean_limit or mean, settings.share_limit, settings.max_limit or largest)


@dataclass(frozen=True)
class MismatchGuard:
    """Comparison of every rollout token's two log-probs over `ranks`, which stops the run beyond `limits`.

    `current`: version of the weights that the trainer holds, where rollouts may be older: those tokens differ rightly,
    as the policy has moved, and have no limit. The tokens of an update's mini-batch, whose versions are not known, all
    count as older. None: the trainer's weights are those that sampled.
    """

    limits: MismatchLimits
    ranks: Ranks
    current: Callable[[], int] | None = None

    def __call__(self, rollout: Rollout | Experience, old: TokenOutputs) -> Metrics:
        """Return differences in nats and importance weights, equal on all ranks.

        `rollout/logprob_diff_*` are of tokens of the current version, if there are any; with `current` also
        `rollout/stale_logprob_diff_*` and `rollout/stale_tokens_fraction`. Raises RolloutMismatchError on all ranks,
        naming limit and worst token; for a difference that is not finite in any case.
        """
        assert old.logprobs is not None
        mask, logprobs = rollout.loss_mask, old.logprobs
        stale_mask = torch.full_like(mask, self.current is not None)
        if self.current is not None and isinstance(rollout, Rollout):
            stale_mask = token_versions(rollout) != self.current()
        names = ("tokens", "prompt_index", "sample_index")
        rows = {name: getattr(rollout, name) for name in names}
        parts = (mask & ~stale_mask, mask & stale_mask)
        summaries = [logprob_mismatch(rollout.rollout_logprobs, logprobs, part, **rows) for part in parts]
        weights = importance_summary(logprobs, rollout.rollout_logprobs, mask)
        fresh, stale, importance = self._over_ranks(summaries, weights)
        if old.entropy is not None:
            importance |= self._deviation((logprobs + old.entropy)[mask & ~stale_mask].double())
        exceeded = self.limits.exceeded(fresh)
        if exceeded is not None:
            raise RolloutMismatchError(
                f"trainer and rollout engine disagree: {exceeded}; the worst is {fresh.describe_worst()}; check that "
                "both run the same weights and dtype before raising the limit"
            )
        if stale.max == torch.inf:
            raise RolloutMismatchError(f"a log-prob is not finite: {stale.describe_worst()}")
        if self.current is None:
            return fresh.metrics() | importance
        tokens = max(fresh.count + stale.count, 1)
        metrics = importance | {"rollout/stale_tokens_fraction": stale.count / tokens}
        metrics |= stale.metrics("rollout/stale_logprob_diff") if stale.count else {}
        return metrics | (fresh.metrics() if fresh.count or not stale.count else {})

    def _deviation(self, surprise: Tensor) -> Metrics:
        """Return the sum of log p + entropy over all tokens, in units of its deviation."""
        total, squares = self.ranks.sum(torch.stack([surprise.sum(), surprise.square().sum()])).tolist()
        return {"rollout/sampling_deviation": total / squares**0.5} if squares else {}

    def _over_ranks(
        self, own: list[LogprobMismatch], importance: Tensor
    ) -> tuple[LogprobMismatch, LogprobMismatch, Metrics]:
        """Return the two summaries over all ranks, and the metrics of importance weights, in one collective."""
        of_this_rank = torch.zeros(self.ranks.size, IMPORTANCE_SIZE, dtype=torch.float64)
        of_this_rank[self.ranks.rank] = importance
        packed = [one.pack(rank=self.ranks.rank, size=self.ranks.size) for one in own]
        sizes = [SUMMARY_SIZE, SUMMARY_SIZE, IMPORTANCE_SIZE]
        fresh, stale, weights = self.ranks.sum(torch.cat([*packed, of_this_rank], dim=1)).split(sizes, dim=1)
        return combine(fresh), combine(stale), importance_metrics(weights)


@dataclass(frozen=True)
class StalenessGuard:
    """Comparison of every token's weight version with the trainer's."""

    limit: int  # versions that a token may be behind: the steps that generation runs ahead
    ranks: Ranks
    current: Callable[[], int]  # version of the weights that the trainer holds

    def __call__(self, rollout: Rollout) -> Metrics:
        """Return mean and largest age in versions over the response tokens of all ranks.

        Raises StaleSampleError on all ranks, naming a sample beyond the limit.
        """
        current, mask = self.current(), rollout.loss_mask
        ages = (current - token_versions(rollout))[mask]
        oldest, newest = (int(ages.max()), int(ages.min())) if len(ages) else (0, 0)
        age, failure = oldest if oldest > self.limit else newest, None
        if not 0 <= age <= self.limit:
            row = int((mask & (token_versions(rollout) == current - age)).any(dim=1).nonzero()[0])
            failure = StaleSampleError(
                f"sample {int(rollout.sample_index[row])} of prompt {int(rollout.prompt_index[row])} of this step has "
                f"tokens of weight version {current - age}, and the trainer has {current}: trainer.async_steps="
                f"{self.limit} allows a token to be as many behind; the servers missed an update, or have other weights"
            )
        raise_together(failure, self.ranks, error=StaleSampleError)
        count, total = self.ranks.sum(torch.tensor([len(ages), ages.sum()], dtype=torch.float64)).tolist()
        largest = float(self.ranks.max(torch.tensor(float(oldest))))
        return {"rollout/staleness_mean": total / max(count, 1.0), "rollout/staleness_max": largest}
