"""Guards on sampled tokens: rollout log-probs against the trainer's, and the age of weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mega_rl.algorithms.mismatch import (
    LogprobMismatch,
    combine,
    importance_metrics,
    importance_summary,
    logprob_mismatch,
)
from mega_rl.config.schema.rollout import MismatchConfig
from mega_rl.errors import RunError
from mega_rl.parallel.agreement import raise_together
from mega_rl.protocols import Ranks, TokenModel
from mega_rl.trainer.loop import Event, Stages, StepLog
from mega_rl.trainer.rows import kept_tokens, select, token_versions
from mega_rl.trainer.selection import StepVersions
from mega_rl.types import Experience, Metrics, Rollout, TokenOutputs

if TYPE_CHECKING:
    from mega_rl.trainer.policy_gradient import Evaluated

AGES = (0, 1, 2, 4)  # steps, the first of each class of ages
KEPT = 1 << 40  # stands for the age of tokens whose log-probs no version's weights give
MOVES = 4.0  # times the measured moves of the policy: older tokens stand in other rows than those measured
DEVIATIONS = 4.5
ROWS = 4  # per replica and step, whose moves are measured


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


@dataclass
class PolicyChanges:
    """Mean |change| of a token's log-prob with each step, as the trainer computes it."""

    versions: StepVersions
    # nats, to the version that a step began with from that of the step before
    of_versions: dict[int, float] = field(default_factory=dict, init=False)

    def since(self, ages: Tensor) -> Tensor:
        """Return [n] float64, nats, the sum over the last `ages`, [n] int64, steps.

        It is infinite where a change is unknown.
        """
        changes = [self.of_versions.get(version, inf) for version in reversed(self.versions.begun)]
        return torch.tensor([0.0, *changes], dtype=torch.float64).cumsum(0)[ages]


@dataclass(frozen=True)
class MismatchGuard:
    """Comparison of every rollout token's two log-probs over `ranks`, which stops the run beyond `limits`.

    `changes`: where rollouts may be older than the trainer's weights. Log-probs of older tokens differ rightly, as the
    policy has moved; their mean difference may be `MOVES` times as large as that, and `DEVIATIONS` of its error more.
    Tokens of an update's mini-batch, whose versions are not known, and those on KV cache that was kept over an update
    have no limit. None: no token is older.
    """

    limits: MismatchLimits
    ranks: Ranks
    changes: PolicyChanges | None = None
    samples_all: bool = True  # neither top-k nor top-p cuts the distribution; else its entropy is not the sampler's

    def __call__(self, rollout: Rollout | Experience, old: TokenOutputs) -> Metrics:
        """Return differences in nats and importance weights, equal on all ranks.

        `rollout/logprob_diff_*` are of tokens of the current version, if there are any; with `changes` there are
        numbers of older ones by age. Raises RolloutMismatchError on all ranks, naming limit and worst token; for a
        difference that is not finite in any case.
        """
        assert old.logprobs is not None
        mask, logprobs, changes = rollout.loss_mask, old.logprobs, self.changes
        ages, moved = torch.zeros_like(rollout.tokens), torch.zeros_like(logprobs, dtype=torch.float64)
        if changes is not None and isinstance(rollout, Rollout):
            kept = mask & kept_tokens(rollout)
            ages = torch.where(mask & ~kept, changes.versions.ages(token_versions(rollout)), 0)
            moved[mask] = changes.since(ages[mask])
            ages[kept], moved[kept] = KEPT, inf
        elif changes is not None:
            ages, moved = ages + AGES[-1], moved + inf
        rows = {name: getattr(rollout, name) for name in ("tokens", "prompt_index", "sample_index")}
        own = [importance_summary(logprobs, rollout.rollout_logprobs, mask)]
        for first, after in pairwise((*AGES, KEPT, inf) if changes is not None else (0, inf)):
            part = mask & (ages >= first) & (ages < after)
            own.append(logprob_mismatch(rollout.rollout_logprobs, logprobs, part, **rows).pack())
            own.append(importance_summary(logprobs, rollout.rollout_logprobs, part))
            square = (logprobs - rollout.rollout_logprobs)[part].double().square().sum()
            own.append(torch.stack([moved[part].sum(), square]))
        importance, fresh_ones, _, _, *of_older = self._over_ranks(own)
        fresh, metrics = combine(fresh_ones), importance_metrics(importance)
        if old.entropy is not None and self.samples_all:
            metrics |= self._deviation((logprobs + old.entropy)[mask & (ages == 0)].double())
        exceeded = self.limits.exceeded(fresh)
        if exceeded is not None:
            raise RolloutMismatchError(
                f"trainer and rollout engine disagree: {exceeded}; the worst is {fresh.describe_worst()}; check that "
                "both run the same weights and dtype before raising the limit"
            )
        if changes is None:
            return fresh.metrics() | metrics
        older = kept_count = 0
        for age, *sums in zip((*AGES[1:], KEPT), of_older[::3], of_older[1::3], of_older[2::3], strict=True):
            one, weights, (moves, squares) = combine(sums[0]), importance_metrics(sums[1]), sums[2].sum(0).tolist()
            older, kept_count = older + one.count, one.count  # those kept come last
            if one.count:
                error = max(squares - one.count * one.mean**2, 0.0) ** 0.5 / one.count
                self._check_older(one, age, moved=moves / one.count, error=error)
                name = "kept" if age == KEPT else f"age_{age}"
                metrics[f"rollout/logprob_diff_{name}"] = one.mean
                metrics[f"importance/effective_{name}"] = weights["importance/effective_fraction"]
        total = max(fresh.count + older, 1)
        metrics["rollout/stale_tokens_fraction"] = (older - kept_count) / total
        if kept_count:
            metrics["rollout/kept_tokens_fraction"] = kept_count / total
        return metrics | (fresh.metrics() if fresh.count or not older else {})

    def _check_older(self, mismatch: LogprobMismatch, age: int, *, moved: float, error: float) -> None:
        """Raise RolloutMismatchError if tokens of an age differ by more than the policy has moved.

        error: of the mean difference, which rare tokens that move far make large.
        """
        if mismatch.max == inf:
            raise RolloutMismatchError(f"a log-prob is not finite: {mismatch.describe_worst()}")
        if mismatch.mean - DEVIATIONS * error > self.limits.mean + MOVES * moved:
            raise RolloutMismatchError(
                f"tokens that are {age} or more steps old differ by a mean of {mismatch.mean:.6g} nats, beyond "
                f"rollout.mismatch.mean_limit={self.limits.mean:g} plus {MOVES:g} times the {moved:.6g} nats by which "
                f"the policy has moved since; the worst is {mismatch.describe_worst()}; check that servers have the "
                "weights and the temperature that their answers name before raising the limit"
            )

    def _deviation(self, surprise: Tensor) -> Metrics:
        """Return the sum of log p + entropy over all tokens, in units of its deviation."""
        total, squares = self.ranks.sum(torch.stack([surprise.sum(), surprise.square().sum()])).tolist()
        return {"rollout/sampling_deviation": total / squares**0.5} if squares else {}

    def _over_ranks(self, own: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return [ranks, k] float64 for each of this rank's [k], in one collective."""
        table = torch.zeros(self.ranks.size, sum(map(len, own)), dtype=torch.float64)
        table[self.ranks.rank] = torch.cat(list(own))
        return self.ranks.sum(table).split([len(one) for one in own], dim=1)


@dataclass
class Rescoring(Event):
    """Scores of responses of generation ahead right before their weights change, and right after.

    Before: every `interval` steps, tokens that servers have just sampled, under the limits of a run without older
    ones. After: how far the update has moved the policy, on rows of the step.
    """

    actor: TokenModel
    guard: MismatchGuard
    changes: PolicyChanges
    newest: Callable[[], Rollout | None]  # responses in progress, as `RolloutStream.newest`; collective
    interval: int
    knows_all: bool  # the algorithm has scored every row with the actor, and the guard has seen it
    stage: Stages
    log: StepLog
    _rows: Rollout = field(init=False)  # the step trains on them
    _logprobs: Tensor = field(init=False)  # before its update
    _is_due: bool = field(default=False, init=False)

    def updated(self, step: int) -> None:
        with self.stage("old_logprobs"):
            now = self.actor.evaluate(self._rows).logprobs
            assert now is not None
        change = (now - self._logprobs)[self._rows.loss_mask].double().abs()
        numbers = torch.tensor([change.sum(), len(change)], dtype=torch.float64)
        total, count = self.guard.ranks.sum(numbers).tolist()
        moved = self.changes.of_versions[self.changes.versions.current() + 1] = total / max(count, 1.0)
        self.log.add({"rollout/policy_change": moved})

    def evaluated(self, step: int, evaluated: Evaluated) -> None:
        rollout, known = evaluated.batch.rollout, evaluated.outputs[0]
        chosen = torch.linspace(0, len(rollout.tokens) - 1, min(ROWS, len(rollout.tokens))).long()
        self._rows = rows = select(rollout, chosen)
        with self.stage("old_logprobs"):
            if not self.knows_all:
                known = self.actor.evaluate(rows)
                self.log.add(self.guard(rows, known))
            assert known.logprobs is not None
            self._logprobs = known.logprobs[chosen] if self.knows_all else known.logprobs
            self._is_due |= step % self.interval == 0
            sampled = self.newest() if self._is_due else None
            if sampled is not None:
                compared, self._is_due = self.guard(sampled, self.actor.evaluate(sampled)), False
                self.log.add({name: one for name, one in compared.items() if name.startswith("rollout/logprob_diff")})


@dataclass(frozen=True)
class StalenessGuard:
    """Comparison of every token's weight version with the trainer's."""

    versions: StepVersions
    ranks: Ranks

    def __call__(self, rollout: Rollout) -> Metrics:
        """Return mean and largest age in steps over the response tokens of all ranks.

        Raises StaleSampleError on all ranks, naming a sample beyond the limit.
        """
        limit, mask, of_tokens = self.versions.limit, rollout.loss_mask, token_versions(rollout)
        ages = self.versions.ages(of_tokens)[mask]
        oldest, newest = (int(ages.max()), int(ages.min())) if len(ages) else (0, 0)
        age, failure = oldest if oldest > limit else newest, None
        if not 0 <= age <= limit:
            version = int(of_tokens[mask].min() if age > limit else of_tokens[mask].max())
            row = int((mask & (of_tokens == version)).any(dim=1).nonzero()[0])
            failure = StaleSampleError(
                f"sample {int(rollout.sample_index[row])} of prompt {int(rollout.prompt_index[row])} of this step has "
                f"tokens of weight version {version}, and the trainer has {self.versions.current()}: "
                f"trainer.async_steps={limit} allows a token to be as many steps behind; the servers missed an update, "
                "or have other weights"
            )
        raise_together(failure, self.ranks, error=StaleSampleError)
        count, total = self.ranks.sum(torch.tensor([len(ages), ages.sum()], dtype=torch.float64)).tolist()
        largest = float(self.ranks.max(torch.tensor(float(oldest))))
        return {"rollout/staleness_mean": total / max(count, 1.0), "rollout/staleness_max": largest}
