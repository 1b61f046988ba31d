"""Weight versions of tokens against the trainer's: numbers, limits, and the comparison of log-probs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from mega_rl.trainer.mismatch import MismatchGuard, MismatchLimits, StalenessGuard, StaleSampleError
from mega_rl.types import Metrics, Rollout, TokenOutputs
from tests.helpers.fakes import FakeRanks
from tests.helpers.rollouts import make_rollout
from tests.helpers.threads import ThreadGroup


def staleness(rollout: Rollout, *, current: int, limit: int) -> tuple[float, float]:
    """Return the mean and the largest age of the tokens."""
    metrics = StalenessGuard(limit=limit, ranks=FakeRanks(), current=lambda: current)(rollout)
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
        return StalenessGuard(limit=1, ranks=ranks, current=lambda: 5)(rollout)  # type: ignore[arg-type]

    results = ThreadGroup(3).run(work)
    assert all(isinstance(result, StaleSampleError) for result in results)
    assert len({str(result) for result in results}) == 1
    assert "sample 0 of prompt 10 " in str(results[0])


def guarded(*, current: int | None, of_tokens: list[list[int]] | None = None, not_finite: bool = False) -> Metrics:
    """Compare two rows of versions 3 and 4, whose log-probs by the trainer are 0.9 and 0.1 away."""
    rollout = versions([3, 2], [3, 4], of_tokens)
    difference = torch.tensor([0.9, 0.1])[:, None] * rollout.loss_mask
    if not_finite:
        difference[0, 3] = torch.nan
    version: Callable[[], int] | None = None if current is None else lambda: current
    guard = MismatchGuard(MismatchLimits(mean=1.0, share=1.0, max=0.5), ranks=FakeRanks(), current=version)
    return guard(rollout, TokenOutputs(logprobs=rollout.rollout_logprobs + difference))


PARTLY_OLD = [[0, 0, 3, 3, 4], [0, 0, 4, 4, 0]]


def test_the_limit_holds_for_tokens_of_the_current_version() -> None:
    """If all are older, the current numbers are left out: a difference of 0 would read as agreement."""
    metrics = guarded(current=4)
    assert metrics["rollout/logprob_diff_max"] == pytest.approx(0.1, abs=1e-6)
    assert metrics["rollout/stale_logprob_diff_max"] == pytest.approx(0.9, abs=1e-6)
    assert metrics["rollout/stale_logprob_diff_mean"] == pytest.approx(0.9, abs=1e-6)
    assert metrics["rollout/stale_tokens_fraction"] == 0.6
    assert metrics["rollout/logprob_diff_large_fraction"] == 0.0
    assert metrics["rollout/stale_logprob_diff_large_fraction"] == 0.0
    older = guarded(current=9)
    assert not any(name.startswith("rollout/logprob_diff") for name in older)
    assert older["rollout/stale_tokens_fraction"] == 1.0
    assert guarded(current=4, of_tokens=[[3] * 5, PARTLY_OLD[1]])["rollout/stale_tokens_fraction"] == 0.6
    fresh = MismatchGuard(MismatchLimits(mean=1.0, share=1.0, max=0.5), ranks=FakeRanks(), current=lambda: 3)
    rollout = make_rollout([2])
    metrics = fresh(rollout, TokenOutputs(logprobs=rollout.rollout_logprobs))
    assert metrics["rollout/logprob_diff_max"] == 0.0
    assert not any(name.startswith("rollout/stale_logprob") for name in metrics)
