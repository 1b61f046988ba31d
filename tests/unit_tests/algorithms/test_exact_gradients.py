"""Expected gradients of the run's own code against exact ones (tests/exact_gradients.py)."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from mega_rl.algorithms.advantages import ESTIMATORS
from mega_rl.algorithms.corrections import CORRECTIONS
from tests.exact_gradients import (
    CORRECTED,
    ESTIMATED,
    Case,
    World,
    cases,
    gradients,
    groups_of_three,
    is_shown,
    measure,
)
from tests.helpers.selection import FULL, covering

PAGE = Path(__file__).parents[3] / "docs" / "exact_gradients.md"
SAMPLES = 100_000 if FULL else 10_000
CHOSEN = [Case(*case) for case in covering([dataclasses.astuple(case) for case in cases()], times=2)]


def test_nothing_is_left_out() -> None:
    assert {name for name, _, _ in ESTIMATED.values()} == ESTIMATORS.keys()
    assert {name for name, _, _ in CORRECTED.values()} == CORRECTIONS.keys()


@pytest.mark.parametrize("case", CHOSEN, ids=lambda case: "-".join(dataclasses.astuple(case)))
def test_the_mean_of_sampled_gradients_is_the_expected_one(case: Case) -> None:
    """Within 4 standard errors of the furthest of 20 parameters; of an unbiased choice the exact gradient itself is.

    Its expectation over all groups is exact to the rounding of float32 advantages, and to 1 / samples where a deviation
    of the batch is unbiased.
    """
    result = measure(case, samples=SAMPLES)
    assert result.error < 4.0
    assert (result.bias < 1e-4) == case.is_exact
    assert result.cosine > 0.65


def test_the_exact_gradient_is_that_of_finite_differences() -> None:
    world, step = World(), 1e-6

    def objective(logits: torch.Tensor) -> float:
        own = world.logprobs(logits, world.responses).sum(1)
        reference = world.logprobs(world.reference, world.responses).sum(1)
        return float((own.exp() * (0.3 * (own - reference) - 0.5 * world.rewards.flatten())).sum())

    exact = world.exact(scale=0.5, beta=0.3)
    for index in range(0, len(exact), 5):
        moved = torch.zeros_like(exact)
        moved[index] = step
        slope = (objective(world.logits + moved) - objective(world.logits - moved)) / (2 * step)
        assert float(exact[index]) == pytest.approx(slope, abs=1e-8)


def test_a_baseline_of_the_sample_itself_is_found() -> None:
    """RLOO with its own reward in the mean is no multiple of 1 any more."""
    world, (groups, probability) = World(), groups_of_three(False)
    own = gradients(world, Case("grpo, no deviation", "ppo"), groups, probability, lambda x: x).sum(0)
    right = gradients(world, Case("rloo", "ppo"), groups, probability, lambda x: x).sum(0)
    torch.testing.assert_close(own, right * 2 / 3, rtol=1e-5, atol=1e-9)


def test_the_page_has_a_row_of_every_case() -> None:
    rows = [re.split(r" *\| *", line)[1:] for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| ")]
    shown = [case for case in cases() if is_shown(case)]
    expected = dict.fromkeys((case.estimator, case.placement, case.correction) for case in shown)
    assert [tuple(row[:3]) for row in rows[1:]] == list(expected)
    assert all(float(row[3]) < 4.0 for row in rows[1:])
