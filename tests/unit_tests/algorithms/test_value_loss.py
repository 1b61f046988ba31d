"""The critic's loss against numbers by hand."""

from __future__ import annotations

import math

import pytest
import torch

from mega_rl.algorithms.losses import clipped_value_loss, explained_variance


@pytest.mark.parametrize(
    ("value", "old", "target", "clip", "expected", "cut"),
    [
        (1.2, 1.0, 2.0, 0.5, 0.5 * 0.8**2, 0),  # inside the clip
        (1.8, 1.0, 2.0, 0.5, 0.5 * 0.5**2, 1),  # moved towards the target beyond the clip: cut at 1.5
        (0.0, 1.0, 2.0, 0.5, 0.5 * 2.0**2, 0),  # moved away: the larger error, not cut
        (1.8, 1.0, 2.0, 0.0, 0.5 * 0.2**2, 0),  # no clip
    ],
)
def test_by_hand(value: float, old: float, target: float, clip: float, expected: float, cut: int) -> None:
    values = torch.tensor([value], requires_grad=True)
    one = torch.ones(1)
    out = clipped_value_loss(
        values,
        old_values=torch.tensor([old]),
        returns=torch.tensor([target]),
        token_weights=one,
        value_clip=clip,
    )
    (gradient,) = torch.autograd.grad(out.loss, values)
    assert out.loss.item() == pytest.approx(expected, rel=1e-6)
    assert out.sums["critic/loss"].item() == out.loss.item()
    assert out.sums["critic/clip_fraction"].item() == cut
    assert gradient.item() == pytest.approx(0.0 if cut else value - target, rel=1e-6)
    assert out.maxima["critic/error_max"].item() == pytest.approx(abs(value - target), rel=1e-6)


def test_weights_and_what_is_off_the_mask() -> None:
    values = torch.tensor([1.0, 3.0, float("nan")], requires_grad=True)
    out = clipped_value_loss(
        values,
        old_values=torch.tensor([1.0, 3.0, float("inf")]),
        returns=torch.tensor([2.0, 1.0, float("nan")]),
        token_weights=torch.tensor([0.75, 0.25, 0.0]),
        value_clip=0.5,
    )
    out.loss.backward()
    assert out.loss.item() == pytest.approx(0.75 * 0.5 * 1 + 0.25 * 0.5 * 4)
    assert out.sums["critic/value_mean"].item() == pytest.approx(1.5)
    assert out.sums["critic/return_mean"].item() == pytest.approx(1.75)
    torch.testing.assert_close(values.grad, torch.tensor([-0.75, 0.5, 0.0]))


def test_explained_variance_by_hand() -> None:
    mask = torch.tensor([[True, True, True, True, False]])
    returns = torch.tensor([[1.0, 2.0, 3.0, 4.0, math.nan]])  # variance 1.25
    assert explained_variance(returns + 7.0, returns, mask).item() == pytest.approx(1.0)
    assert explained_variance(torch.zeros(1, 5), returns, mask).item() == pytest.approx(0.0)
    values = torch.tensor([[1.0, 2.0, 3.0, 2.0, math.nan]])  # errors 0, 0, 0, 2: variance 0.75
    assert explained_variance(values, returns, mask).item() == pytest.approx(1 - 0.75 / 1.25)
    assert explained_variance(values, torch.ones(1, 5), mask).item() == 0.0
