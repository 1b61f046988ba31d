"""Global moments and whitening: N shards must give what the whole gives."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch

from mega_rl.algorithms.statistics import global_moments, whiten
from tests.helpers.threads import on_simulated_ranks


def test_moments_by_hand() -> None:
    x = torch.tensor([[1.0, 2.0, 100.0], [3.0, 6.0, float("nan")]])
    mask = torch.tensor([[True, True, False], [True, True, False]])
    moments = global_moments(x, mask)
    # mean (1 + 2 + 3 + 6) / 4 = 3; population variance (4 + 1 + 0 + 9) / 4 = 3.5
    assert moments.count.item() == 4
    assert moments.mean.item() == 3.0
    assert moments.variance.item() == 3.5


def test_a_large_mean_costs_no_digits() -> None:
    # E[x^2] - E[x]^2 in float32 would give 0 or worse here.
    x = torch.tensor([[4096.0, 4096.5, 4097.0]])
    moments = global_moments(x, torch.ones_like(x, dtype=torch.bool))
    assert moments.variance.item() == pytest.approx(1 / 6, rel=1e-12)


def test_whiten_by_hand() -> None:
    x = torch.tensor([[1.0, 3.0, 8.0]])
    mask = torch.tensor([[True, True, False]])
    torch.testing.assert_close(whiten(x, mask, eps=0.0), torch.tensor([[-1.0, 1.0, 0.0]]))


@pytest.mark.parametrize("cuts", [[5], [2, 5], [0, 1, 3]], ids=["two", "three", "four, one empty"])
def test_whitening_shards_equals_whitening_the_whole(cuts: list[int]) -> None:
    g = torch.Generator().manual_seed(3)
    x = 50.0 + 0.1 * torch.randn(8, 6, generator=g)
    mask = torch.rand(8, 6, generator=g) < 0.6
    whole = whiten(x, mask)
    bounds = [0, *cuts, 8]
    shards = [(x[a:b], mask[a:b]) for a, b in itertools.pairwise(bounds)]
    parts = on_simulated_ranks([partial(lambda x, m, s: whiten(x, m, sum_over_ranks=s), *shard) for shard in shards])
    # Only the order of float64 sums differs: one float32 rounding at most.
    torch.testing.assert_close(torch.cat(parts), whole, rtol=2e-7, atol=0)
    chosen = whole[mask].double()
    assert abs(chosen.mean().item()) < 1e-6
    assert chosen.var(unbiased=False).item() == pytest.approx(1.0, abs=1e-5)


def test_one_token_or_none() -> None:
    x = torch.tensor([[5.0, 7.0]])
    assert torch.equal(whiten(x, torch.tensor([[True, False]])), torch.zeros(1, 2))
    assert torch.equal(whiten(x, torch.zeros(1, 2, dtype=torch.bool)), torch.zeros(1, 2))
