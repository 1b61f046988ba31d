"""Gradient norms that let an optimizer step be made, and those that do not."""

from __future__ import annotations

import math

import pytest
import torch

from mega_rl.algorithms.statistics import QUANTILES, histogram_where
from mega_rl.engines.microbatches import Finished, check_norm, reduce_losses
from mega_rl.errors import NonFiniteGradientError
from mega_rl.parallel.comm import SingleRank
from mega_rl.types import LossOutput, TokenOutputs


@pytest.mark.parametrize("norm", [float("nan"), float("inf"), float("-inf")])
def test_a_norm_that_is_not_finite_is_an_error_with_the_updates_metrics(norm: float) -> None:
    with pytest.raises(NonFiniteGradientError, match=f"actor: the gradient norm is {norm}") as raised:
        check_norm("actor", norm, {"loss": 0.5})
    assert raised.value.norm is norm
    assert raised.value.metrics == {"loss": 0.5}


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


def test_quantiles_are_of_all_micro_batches() -> None:
    """A hundred and one ratios in two micro-batches, those that do not count beside them."""
    ratios = torch.linspace(0.5, 1.5, 101, dtype=torch.float64)
    results = []
    for part in (ratios[:30], ratios[30:]):
        one = microbatch(0.0, 0.0, 0.0)
        assert one.loss is not None
        x = torch.cat([part.log(), torch.full((50,), 9.0)])
        one.loss.log_histograms["actor/ratio"] = histogram_where(x, x < 9.0)
        results.append(one)
    metrics = reduce_losses(results, SingleRank())
    for name, share in QUANTILES.items():
        exact = float(ratios.log().quantile(share, interpolation="higher"))
        assert abs(math.log(metrics[f"actor/ratio_{name}"]) - exact) <= abs(exact) / 128 + 2**-24
    assert metrics["actor/ratio_p50"] == 1.0
    none = microbatch(0.0, 0.0, 0.0)
    assert none.loss is not None
    none.loss.log_histograms["actor/ratio"] = histogram_where(torch.zeros(3), torch.zeros(3, dtype=torch.bool))
    assert "actor/ratio_p50" not in reduce_losses([none], SingleRank())
