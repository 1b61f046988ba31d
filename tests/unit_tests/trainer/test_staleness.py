"""Weight versions of tokens against the trainer's: numbers, limits, and the comparison of log-probs."""

from __future__ import annotations

import pytest
import torch

from mega_rl.trainer.mismatch import (
    MismatchGuard,
    MismatchLimits,
    PolicyChanges,
    RolloutMismatchError,
    StalenessGuard,
    StaleSampleError,
)
from mega_rl.trainer.selection import StepVersions
from mega_rl.types import Metrics, Rollout, TokenOutputs
from tests.helpers.fakes import FakeRanks
from tests.helpers.rollouts import make_rollout
from tests.helpers.threads import ThreadGroup


def steps(current: int, limit: int = 9) -> StepVersions:
    """Return versions of a run that publishes once in each step."""
    return StepVersions(limit, lambda: current, [*range(current - limit, current + 1)])


def staleness(rollout: Rollout, *, current: int, limit: int) -> tuple[float, float]:
    """Return the mean and the largest age of the tokens."""
    metrics = StalenessGuard(steps(current, limit), FakeRanks())(rollout)
    assert metrics.keys() == {"rollout/staleness_mean", "rollout/staleness_max"}
    return metrics["rollout/staleness_mean"], metrics["rollout/staleness_max"]


def versions(lengths: list[int], of_samples: list[int], of_tokens: list[list[int]] | None = None) -> Rollout:
    rollout = make_rollout(lengths)
    rollout.weight_version = torch.tensor(of_samples)
    rollout.token_versions = None if of_tokens is None else torch.tensor(of_tokens)
    return rollout


@pytest.mark.parametrize(
    ("rollout", "expected"),
    [
        (versions([3, 1], [4, 4]), (0.0, 0.0)),
        (versions([3, 1], [3, 4]), (0.75, 1.0)),
        # Versions 0 stand on prompt and padding, off the mask.
        (versions([3, 2], [3, 3], [[0, 0, 3, 3, 4], [0, 0, 4, 4, 0]]), (0.4, 1.0)),
        (versions([2, 0], [4, 0]), (0.0, 0.0)),  # a failed sample
        (versions([0], [0]), (0.0, 0.0)),
    ],
    ids=["current", "by sample", "by token", "failed", "no token"],
)
def test_staleness_is_counted_by_token(rollout: Rollout, expected: tuple[float, float]) -> None:
    assert staleness(rollout, current=4, limit=1) == expected


def test_ages_count_steps_whatever_they_publish() -> None:
    """Steps began with 2, 5, 6 and 9; versions between two of them are as old as the first."""
    versions = StepVersions(3, lambda: 9)
    versions.restore([1, 2, 5, 6])
    assert versions.first() == 1
    versions.begin()
    assert versions.begun == [2, 5, 6, 9]
    assert versions.ages(torch.arange(1, 12)).tolist() == [4, 3, 3, 3, 2, 1, 1, 1, 0, -1, -2]
    assert [versions.first(later) for later in range(5)] == [2, 5, 6, 9, 10]
    begin = StepVersions(2, lambda: 1)
    begin.begin()
    assert begin.begun == [0, 0, 1]
    assert begin.ages(torch.tensor([1, 2])).tolist() == [0, -1]
    never = StepVersions(0, lambda: 4)  # synchronous: nobody counts
    assert never.ages(torch.tensor([3, 4, 5])).tolist() == [1, 0, -1]


@pytest.mark.parametrize("by_token", [False, True])
def test_a_sample_beyond_the_limit_is_named(by_token: bool) -> None:
    tokens = [[5] * 4] * 3 + [[5, 5, 3, 5]]
    rollout = versions([2] * 4, [5] * 4, tokens) if by_token else versions([2] * 4, [5, 5, 5, 3])
    match = r"sample 1 of prompt 1 .* weight version 3, and the trainer has 5: trainer.async_steps=1 "
    with pytest.raises(StaleSampleError, match=match):
        staleness(rollout, current=5, limit=1)
    assert staleness(rollout, current=5, limit=2)[1] == 2.0


def test_a_version_that_the_trainer_never_had() -> None:
    with pytest.raises(StaleSampleError, match=r"sample 1 of prompt 0 .* 6, and the trainer has 5"):
        staleness(versions([2, 2], [5, 6]), current=5, limit=1)


@pytest.mark.parametrize("version", [2, 9])
def test_every_rank_raises_the_same(version: int) -> None:
    """Rank 1 alone holds the sample; rank 2 holds none at all."""

    def work(ranks: object) -> Metrics:
        rank: int = ranks.rank  # type: ignore[attr-defined]
        rollout = make_rollout([3, 3] if rank < 2 else [], version=5)
        rollout.prompt_index += 10 * rank
        if rank == 1:
            rollout.weight_version[0] = version
        return StalenessGuard(steps(5, 1), ranks)(rollout)  # type: ignore[arg-type]

    results = ThreadGroup(3).run(work)
    assert all(isinstance(result, StaleSampleError) for result in results)
    assert len({str(result) for result in results}) == 1
    assert "sample 0 of prompt 10 " in str(results[0])


def guarded(
    *, current: int, of_tokens: list[list[int]] | None = None, difference: float = 0.9, moved: float | None = None
) -> Metrics:
    """Compare two rows of versions 3 and 4, whose log-probs by the trainer are `difference` and 0.1 away."""
    rollout = versions([3, 2], [3, 4], of_tokens)
    away = torch.tensor([difference, 0.1])[:, None] * rollout.loss_mask
    changes = PolicyChanges(steps(current))
    if moved is not None:
        changes.of_versions = dict.fromkeys(range(current + 1), moved)
    guard = MismatchGuard(MismatchLimits(mean=0.15, share=1.0, max=0.5), FakeRanks(), changes)
    return guard(rollout, TokenOutputs(logprobs=rollout.rollout_logprobs + away))


PARTLY_OLD = [[0, 0, 3, 3, 4], [0, 0, 4, 4, 0]]


def test_tokens_kept_over_an_update_have_no_limit() -> None:
    """They have numbers of their own, and those of other tokens are as without them."""
    rollout = versions([3, 2], [4, 4], [[0, 0, 4, 4, 4], [0, 0, 4, 4, 0]])
    rollout.kept = torch.tensor([[False] * 3 + [True] * 2, [False] * 5])
    away = torch.tensor([0.9, 0.1])[:, None] * rollout.kept + 0.05 * rollout.loss_mask
    guard = MismatchGuard(MismatchLimits(0.15, 1.0, 0.5), FakeRanks(), PolicyChanges(steps(4)))
    metrics = guard(rollout, TokenOutputs(logprobs=rollout.rollout_logprobs + away))
    assert metrics["rollout/logprob_diff_max"] == pytest.approx(0.05, abs=1e-6)
    assert metrics["rollout/logprob_diff_kept"] == pytest.approx(0.95, abs=1e-6)
    assert metrics["rollout/kept_tokens_fraction"] == 0.4
    assert metrics["rollout/stale_tokens_fraction"] == 0.0


def test_numbers_are_those_of_each_age() -> None:
    """If all are older, the current numbers are left out: a difference of 0 would read as agreement."""
    metrics = guarded(current=4)
    assert metrics["rollout/logprob_diff_max"] == pytest.approx(0.1, abs=1e-6)
    assert metrics["rollout/logprob_diff_age_1"] == pytest.approx(0.9, abs=1e-6)
    assert metrics["importance/effective_age_1"] == pytest.approx(1.0)
    assert metrics["rollout/stale_tokens_fraction"] == 0.6
    older = guarded(current=9)
    assert not any(name.startswith("rollout/logprob_diff_m") for name in older)
    assert older["rollout/logprob_diff_age_4"] == pytest.approx((3 * 0.9 + 2 * 0.1) / 5, abs=1e-6)
    assert older["rollout/stale_tokens_fraction"] == 1.0
    assert guarded(current=4, of_tokens=[[3] * 5, PARTLY_OLD[1]])["rollout/stale_tokens_fraction"] == 0.6
    fresh = MismatchGuard(MismatchLimits(mean=1.0, share=1.0, max=0.5), FakeRanks(), PolicyChanges(steps(3)))
    rollout = make_rollout([2])
    metrics = fresh(rollout, TokenOutputs(logprobs=rollout.rollout_logprobs))
    assert metrics["rollout/logprob_diff_max"] == 0.0
    assert not any("_age_" in name for name in metrics)


@pytest.mark.parametrize(
    ("current", "moved", "passes"), [(4, 0.2, True), (4, 0.15, False), (5, 0.15, True), (6, 0.05, False)]
)
def test_older_tokens_differ_as_far_as_the_policy_moved(current: int, moved: float, passes: bool) -> None:
    """Tokens of version 3, all 0.9 away: the limit is 0.15 and four times the moves of `current - 3` updates."""
    rollout = versions([400], [3])
    changes = PolicyChanges(steps(current))
    changes.of_versions = {version: moved if version > 3 else 9.0 for version in range(current + 1)}
    guard = MismatchGuard(MismatchLimits(mean=0.15, share=1.0, max=0.5), FakeRanks(), changes)
    outputs = TokenOutputs(logprobs=rollout.rollout_logprobs + 0.9 * rollout.loss_mask)
    if passes:
        assert guard(rollout, outputs)["rollout/stale_tokens_fraction"] == 1.0
        return
    age = 1 if current == 4 else 2
    with pytest.raises(RolloutMismatchError, match=rf"{age} or more steps old differ by a mean of 0\.9 nats, beyond r"):
        guard(rollout, outputs)


def test_a_rare_token_that_moves_far_is_no_fault() -> None:
    """One of 400 tokens is 8 nats away, ten times the limit in the mean: that is chance, fifty of them are not."""
    rollout = versions([400], [3])
    changes = PolicyChanges(steps(4))
    changes.of_versions = {4: 1e-4}
    guard, away = (
        MismatchGuard(MismatchLimits(mean=1e-3, share=1.0, max=9.0), FakeRanks(), changes),
        torch.zeros(1, 402),
    )
    away[0, 7] = 8.0
    assert guard(rollout, TokenOutputs(logprobs=rollout.rollout_logprobs + away))["rollout/logprob_diff_age_1"] > 0.01
    away[0, 7:57] = 8.0
    with pytest.raises(RolloutMismatchError, match="1 or more steps old differ by a mean of 1 nats"):
        guard(rollout, TokenOutputs(logprobs=rollout.rollout_logprobs + away))


@pytest.mark.parametrize("current", [4, 9])
def test_older_tokens_without_a_number_end_the_run(current: int) -> None:
    with pytest.raises(RolloutMismatchError, match="a log-prob is not finite: token id"):
        guarded(current=current, difference=torch.nan)
