"""The comparison of learning curves: the half that needs no TRL, with two steps, and the verdict on given runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.counting import CollectiveRecorder
from tests.helpers.distributed import run_ranks

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RISING = [0.1 + 0.02 * step for step in range(30)]


@pytest.fixture
def learning(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import learning  # type: ignore[import-not-found]

    return learning


def train_twice(rank: int, folder: str) -> list[list[float]]:
    """Return the rewards of two steps, without a fault and with one; the first run makes no collective of its own."""
    sys.path.insert(0, folder)
    import learning

    with CollectiveRecorder() as recorder:
        runs = [learning.run_one("mega_rl", seed=3, steps=2, fault=None)]
    # Megatron-Core's own: the gradient norm of each update, and the optimizer's groups of parameters once.
    assert [call.op for call in recorder.collectives if call.op != "all_gather"] == [
        "all_reduce"
    ] * 2 * learning.UPDATES
    assert sum(call.op == "all_gather" for call in recorder.collectives) <= 4
    runs.append(learning.run_one("mega_rl", seed=3, steps=2, fault="shift"))
    assert [len(run.step_s) for run in runs] == [1, 1]
    return [run.rewards for run in runs]


def test_a_fault_changes_the_second_step_and_not_the_first() -> None:
    """Samples of the first step come from the weights at the start, which are the seed's."""
    ((right, wrong),) = run_ranks(1, train_twice, str(BENCHMARKS), timeout_s=120)
    assert len(right) == len(wrong) == 2
    assert right[0] == wrong[0]
    assert right[1] != wrong[1]
    assert 0.0 < right[0] < 0.3, "a random model is right by chance alone"


def runs_of(
    learning: Any, *, gain: float = 0.0, noise: tuple[float, ...] = (0.01, 0.0, -0.01), trl_step_s: float = 0.4
) -> list[Any]:
    """Return three seeds of each trainer; mega_rl's rewards are higher by `gain` and the seed's `noise`."""
    return [
        learning.Run(name, seed, [reward + more for reward in RISING], [seconds] * 29, [2.0 - more] * 30)
        for name, extra, seconds in (
            ("mega_rl", [gain + one for one in noise], 0.1),
            ("trl", [-0.01, 0.0, 0.01], trl_step_s),
        )
        for seed, more in enumerate(extra)
    ]


def test_bands_that_are_apart_are_named(learning: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Three values 0.01 apart have a 95 % interval of 4.303 * 0.01 / sqrt(3) = 0.0248 to each side."""
    assert learning.judge(runs_of(learning, gain=0.048), None) == 0
    assert learning.judge(runs_of(learning, gain=0.052), None) == 1
    printed = capsys.readouterr().out
    assert "missed: the bands are apart in the windows that end with steps 10, 20, 30\n" in printed
    assert "overlapping windows: 0 of 3" in printed


def test_a_difference_that_all_seeds_share_is_seen_where_bands_overlap(
    learning: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Differences of -0.001, 0 and 0.001 have an interval of 0.00248 to each side, a tenth of what bands have."""
    noise = (-0.011, 0.0, 0.011)
    assert learning.judge(runs_of(learning, gain=0.0023, noise=noise), None) == 0
    for gain in (0.0027, -0.0027):
        assert learning.judge(runs_of(learning, gain=gain, noise=noise), None) == 1
        expected = (gain, gain - 0.00248, gain + 0.00248)
        assert learning.early_difference(runs_of(learning, gain=gain, noise=noise), "rewards") == pytest.approx(
            expected, abs=1e-5
        )
    printed = capsys.readouterr().out
    assert "missed: rewards of mega_rl less that of TRL is -0.003 in steps 1 to 20, not 0\n" in printed
    assert "missed: entropy of mega_rl less that of TRL is +0.003 in steps 1 to 20, not 0\n" in printed
    assert "overlapping windows: 3 of 3" in printed
    assert "the bands are apart" not in printed
