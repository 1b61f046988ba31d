"""Balancing: nothing lost, limits kept, loads near equal, quick."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_rl.data.minibatches import minimum_microbatches, partition_balanced, plan_microbatches


def lognormal(count: int, *, sigma: float = 1.0, longest: int = 32768, seed: int = 0) -> list[int]:
    """Lengths as reasoning responses have them: median 665 tokens, a few very long ones."""
    rng = random.Random(seed)
    return [min(longest, max(1, int(rng.lognormvariate(6.5, sigma)))) for _ in range(count)]


def loads(lengths: list[int], parts: list[list[int]]) -> list[int]:
    return [sum(lengths[row] for row in part) for part in parts]


@given(lengths=st.lists(st.integers(1, 100), max_size=60), parts=st.integers(1, 9), equal=st.booleans())
def test_every_row_is_in_one_part(lengths: list[int], parts: int, equal: bool) -> None:
    result = partition_balanced(lengths, parts, equal_counts=equal)
    assert len(result) == parts
    assert sorted(row for part in result for row in part) == list(range(len(lengths)))
    assert all(part == sorted(part) for part in result)
    assert result == partition_balanced(lengths, parts, equal_counts=equal)
    if equal:
        counts = [len(part) for part in result]
        assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("equal_counts", [True, False])
@pytest.mark.parametrize(
    ("rows", "parts", "sigma"),
    [(64, 8, 0.5), (128, 8, 1.0), (512, 8, 1.0), (1024, 64, 1.0), (4096, 128, 0.8), (1023, 64, 1.0)],
)
def test_loads_are_near_equal(rows: int, parts: int, sigma: float, equal_counts: bool) -> None:
    for seed in range(3):
        lengths = lognormal(rows, sigma=sigma, seed=seed)
        load = loads(lengths, partition_balanced(lengths, parts, equal_counts=equal_counts))
        # Nothing beats the part with the longest row; equal counts give it the shortest rows as company.
        company = sum(sorted(lengths)[: rows // parts - 1]) if equal_counts else 0
        mean = sum(lengths) / parts
        assert max(load) <= max(1.05 * mean, max(lengths) + company)


def test_plan_falls_back_where_balancing_overfills() -> None:
    # Longest-first gives 5+4 | 5+3+3 = 11; the fit is 5+5 | 4+3+3.
    lengths = [5, 5, 4, 3, 3]
    assert max(loads(lengths, partition_balanced(lengths, 2, equal_counts=False))) == 11
    plan = plan_microbatches(lengths, max_tokens=10)
    assert plan == [[0, 1], [2, 3, 4]]
    assert plan_microbatches(lengths, max_tokens=10, count=3) == [[0, 4], [2, 3], [1]]


@given(
    lengths=st.lists(st.integers(1, 50), max_size=60),
    max_tokens=st.integers(50, 200),
    extra=st.integers(0, 5),
)
@settings(deadline=None)
def test_a_plan_keeps_its_limits(lengths: list[int], max_tokens: int, extra: int) -> None:
    least = minimum_microbatches(lengths, max_tokens)
    assert math.ceil(sum(lengths) / max_tokens) <= least <= len(lengths)
    for count in (None, least + extra):
        plan = plan_microbatches(lengths, max_tokens=max_tokens, count=count)
        assert len(plan) == (least if count is None else count)
        assert sorted(row for rows in plan for row in rows) == list(range(len(lengths)))
        load = loads(lengths, plan)
        assert max(load, default=0) <= max_tokens
        assert load == sorted(load, reverse=True)
