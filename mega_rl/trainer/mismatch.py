"""Guards on sampled tokens: rollout log-probs against the trainer's, and the age of weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from statistics import median

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
from mega_rl.errors import RunError
from mega_rl.protocols import Ranks
from mega_rl.trainer.rows import token_versions
from mega_rl.types import Experience, Metrics, Rollout, TokenOutputs

DRIFT = 5.0  # times the first steps' median that older tokens may differ by
FIRST_STEPS = 10
SMALL = (0.15, 0.05)  # nats: mean difference and k3 of older tokens that never stop a run; a warm-up begins far below


class RolloutMismatchError(RunError):
    """The rollout engine and the trainer disagree about a token's probability."""


@dataclass(frozen=True)
class MismatchLimits:
    """Limits of |trainer - rollout| over a batch's tokens, in nats.

    share: of tokens that differ by 1 nat or more.
    """

    mean: float
    share: float
    max: float  # infinite: only a difference that is not finite is too large

    def exceeded(self, mismatch: LogprobMismatch) -> str | None:
        """Return which limit the tokens are beyond, with setting and value, or None."""
        if mismatch.max == inf:
            return "a log-prob is not finite"
        if mismatch.max > self.max:
            return _beyond("a token", mismatch.max, "max", self.max)
        if mismatch.mean > self.mean:
            return _beyond("the mean", mismatch.mean, "mean", self.mean)
        if mismatch.share_of_large > self.share:
            return _beyond(f"a share of {mismatch.share_of_large:.3g} of the tokens", 1.0, "share", self.share)
        return None


def usual_limits(*, in_fp32: bool, mean: float, share: float, largest: float) -> MismatchLimits:
    """Return the limits of the settings; 0 allows for rounding. in_fp32: trainer and rollouts are."""
    usual_mean, usual_max = (1e-3, 1.0) if in_fp32 else (0.15, inf)
    return MismatchLimits(mean=mean or usual_mean, share=share, max=largest or usual_max)


def _beyond(which: str, value: float, name: str, limit: float) -> str:
    return f"{which} differs by {value:.6g} nats or more, beyond rollout.mismatch.{name}_limit={limit:g}"


@dataclass(frozen=True)
class MismatchGuard:
    """Comparison of every rollout token's two log-probs over `ranks`, which stops the run beyond `limits`.

    `current`: version of the weights that the trainer holds, where rollouts may be one version older. Older tokens
    differ rightly, as the policy has moved: their mean difference and their KL (k3) may be `DRIFT` times the median
    of the first `FIRST_STEPS` steps, which a resumed run takes anew. The tokens of an update's mini-batch, whose
    versions are not known, all count as older. None: the trainer's weights are those that sampled.
    """

    limits: MismatchLimits
    ranks: Ranks
    current: Callable[[], int] | None = None
    _first: list[tuple[float, float]] = field(default_factory=list)  # (mean difference, k3) of steps with older tokens

    def __call__(self, rollout: Rollout | Experience, old: TokenOutputs) -> Metrics:
        """Return the largest and mean difference in nats and their histogram, equal on all ranks.

        `rollout/logprob_diff_*` (see LogprobMismatch.metrics) of tokens of the current version, left out when all
        are older; with `current` also `rollout/stale_logprob_diff_*` and `rollout/stale_tokens_fraction`. Of all
        tokens `importance/*` (see `importance_metrics`).

        Raises:
            RolloutMismatchError: on all ranks, naming limit and worst token. A difference that is not finite always is
                one.
        """
        assert old.logprobs is not None
        stale_mask = self._stale(rollout)
        mask, logprobs = rollout.loss_mask, old.logprobs
        (fresh, stale), (importance, drift) = self._over_ranks(
            [_summary(rollout, logprobs, part) for part in (mask & ~stale_mask, mask & stale_mask)],
            [importance_summary(logprobs, rollout.rollout_logprobs, part) for part in (mask, mask & stale_mask)],
        )
        if old.entropy is not None:
            importance |= self._deviation((old.logprobs + old.entropy)[rollout.loss_mask & ~stale_mask].double())
        exceeded = self.limits.exceeded(fresh)
        if exceeded is not None:
            raise RolloutMismatchError(
                f"trainer and rollout engine disagree: {exceeded}; the worst is {fresh.describe_worst()}; check that "
                "both run the same weights and dtype before raising the limit"
            )
        if stale.max == torch.inf:
            raise RolloutMismatchError(f"a log-prob is not finite: {stale.describe_worst()}")
        if stale.count:
            self._check_drift(stale, drift["importance/k3"])
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

    def _check_drift(self, stale: LogprobMismatch, k3: float) -> None:
        """Compare the older tokens of a step with those of the first steps. Raises RolloutMismatchError."""
        if len(self._first) < FIRST_STEPS:
            self._first.append((stale.mean, k3))
            return
        numbers = zip(
            ("mean difference", "KL (k3)"), (stale.mean, k3), zip(*self._first, strict=True), SMALL, strict=True
        )
        for what, value, first, least in numbers:
            if value > max(DRIFT * median(first), least):
                raise RolloutMismatchError(
                    f"tokens of older weights have a {what} of {value:.6g} nats from the trainer, and the first "
                    f"{FIRST_STEPS} steps a median of {median(first):.6g}: at most {DRIFT:g} times that, or {least:g}, "
                    f"may be; the worst is {stale.describe_worst()}; lower optim.lr, or look at the servers"
                )

    def _stale(self, rollout: Rollout | Experience) -> Tensor:
        """[B, S] bool, tokens that older weights sampled."""
        if self.current is None:
            return torch.zeros_like(rollout.loss_mask)
        if not isinstance(rollout, Rollout):
            return torch.ones_like(rollout.loss_mask)
        return token_versions(rollout) != self.current()

    def _over_ranks(
        self, own: list[LogprobMismatch], importance: list[Tensor]
    ) -> tuple[list[LogprobMismatch], list[dict[str, float]]]:
        """Return the summaries over all ranks, and the metrics of importance weights, in one collective."""
        of_this_rank = torch.zeros(self.ranks.size, len(importance) * IMPORTANCE_SIZE, dtype=torch.float64)
        of_this_rank[self.ranks.rank] = torch.cat(importance)
        packed = [one.pack(rank=self.ranks.rank, size=self.ranks.size) for one in own]
        sizes = [SUMMARY_SIZE] * len(own) + [IMPORTANCE_SIZE] * len(importance)
        parts = self.ranks.sum(torch.cat([*packed, of_this_rank], dim=1)).split(sizes, dim=1)
        return [combine(part) for part in parts[: len(own)]], [importance_metrics(part) for part in parts[len(own) :]]


def _summary(rollout: Rollout | Experience, logprobs: Tensor, mask: Tensor) -> LogprobMismatch:
    return logprob_mismatch(
        rollout.rollout_logprobs,
        logprobs,
        mask,
        tokens=rollout.tokens,
        prompt_index=rollout.prompt_index,
        sample_index=rollout.sample_index,
    )


class StaleSampleError(RunError):
    """A sample of weights that are too old, or that the trainer never had."""


@dataclass(frozen=True)
class StalenessGuard:
    """Comparison of every token's weight version with the trainer's.

    `current`: version of the weights that the trainer holds (`WeightSync.weight_version`); `limit`: versions that a
    token may be behind it, the steps that generation runs ahead.
    """

    limit: int
    ranks: Ranks
    current: Callable[[], int]

    def __call__(self, rollout: Rollout) -> Metrics:
        """Return `rollout/staleness_mean` and `rollout/staleness_max`, versions, over the response tokens of all ranks.

        Raises:
            StaleSampleError: on all ranks, naming the first sample beyond the limit.
        """
        staleness = self.current() - token_versions(rollout)
        mask = rollout.loss_mask
        own = torch.tensor([mask.sum(), staleness[mask].sum(), *_worst(rollout, staleness)], dtype=torch.float64)
        packed = torch.zeros(self.ranks.size, len(own), dtype=torch.float64)
        packed[self.ranks.rank] = own
        rows = [row for row in self.ranks.sum(packed).tolist() if row[0]]
        if not rows:
            return {"rollout/staleness_mean": 0.0, "rollout/staleness_max": 0.0}
        self._check(rows)
        tokens = sum(row[0] for row in rows)
        return {
            "rollout/staleness_mean": sum(row[1] for row in rows) / tokens,
            "rollout/staleness_max": max(row[2] for row in rows),
        }

    def _check(self, rows: list[list[float]]) -> None:
        """Raise for a sample that is too old or too new; rows: packed, one per rank."""
        current = self.current()
        _, _, oldest, prompt, sample, *_ = min(rows, key=lambda row: (-row[2], row[3], row[4]))
        if oldest > self.limit:
            raise StaleSampleError(
                f"sample {sample:.0f} of prompt {prompt:.0f} of this step has tokens of weight version "
                f"{current - oldest:.0f}, {oldest:.0f} behind the trainer's {current}: more than "
                f"trainer.async_steps={self.limit} allows; the servers missed a weight update"
            )
        *_, newest, prompt, sample = min(rows, key=lambda row: (row[5], row[6], row[7]))
        if newest < 0:
            raise StaleSampleError(
                f"sample {sample:.0f} of prompt {prompt:.0f} of this step has tokens of weight version "
                f"{current - newest:.0f}, newer than the trainer's {current}: the servers hold weights of another run"
            )


def _worst(rollout: Rollout, staleness: Tensor) -> list[int]:
    """Return (staleness, prompt, sample) of the stalest token, then of the newest; zeros without tokens."""
    rows, columns = rollout.loss_mask.nonzero(as_tuple=True)
    if not len(rows):
        return [0] * 6
    values = staleness[rows, columns]
    worst = []
    for place in (int(values.argmax()), int(values.argmin())):
        row = rows[place]
        worst += [int(values[place]), int(rollout.prompt_index[row]), int(rollout.sample_index[row])]
    return worst
