"""Global moments and whitening: N shards must give what the whole gives."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch

from mega_rl.algorithms.statistics import global_moments, whiten
from tests.helpers.threads import on_simulated_ranks


def test_a_large_mean_costs_no_digits() -> None:
    # E[x^2] - E[x]^2 in float32 would give 0 or worse here.
    x = torch.tensor([[4096.0, 4096.5, 4097.0]])
    _, variance = global_moments(x, torch.ones_like(x, dtype=torch.bool))
    assert variance.item() == pytest.approx(1 / 6, rel=1e-12)


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
