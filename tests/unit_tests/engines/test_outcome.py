"""Gradient norms that let an optimizer step be made, and those that do not."""

from __future__ import annotations

import pytest
import torch

from mega_rl.engines.outcome import Finished, check_norm, reduce_losses, was_clipped
from mega_rl.errors import NonFiniteGradientError
from mega_rl.parallel.comm import SingleRank
from mega_rl.types import LossOutput, TokenOutputs


@pytest.mark.parametrize("norm", [float("nan"), float("inf"), float("-inf")])
def test_a_norm_that_is_not_finite_is_an_error_with_the_updates_metrics(norm: float) -> None:
    with pytest.raises(NonFiniteGradientError, match=f"actor: the gradient norm is {norm}") as raised:
        check_norm("actor", norm, {"loss": 0.5})
    assert raised.value.norm is norm
    assert raised.value.metrics == {"loss": 0.5}


@pytest.mark.parametrize("norm", [0.0, 1e30])
def test_any_other_norm_passes(norm: float) -> None:
    check_norm("actor", norm, {})


def test_an_update_is_clipped_above_its_limit_alone() -> None:
    assert was_clipped(1.5, 1.0) == {"grad_clipped_fraction": 1.0}
    assert was_clipped(1.0, 1.0) == {"grad_clipped_fraction": 0.0}
    assert was_clipped(1.5, 0.0) == {}, "no limit, no share"


def microbatch(total: float, most: float, least: float) -> Finished:
    loss = LossOutput(
        torch.tensor(0.0),
        sums={"sum": torch.tensor(total)}, maxima={"max": torch.tensor(most)}, minima={"min": torch.tensor(least)},
    )  # fmt: skip
    return Finished(None, TokenOutputs(), loss)  # type: ignore[arg-type]


def test_extremes_of_micro_batches_are_those_of_the_update() -> None:
    results = [microbatch(1.0, 1.25, 0.5), microbatch(2.0, 1.5, 0.75)]
    assert reduce_losses(results, SingleRank()) == {"sum": 3.0, "max": 1.5, "min": 0.5}


def test_the_minimum_of_no_token_is_no_number() -> None:
    assert reduce_losses([microbatch(0.0, 0.0, float("inf"))], SingleRank()) == {"sum": 0.0, "max": 0.0}
