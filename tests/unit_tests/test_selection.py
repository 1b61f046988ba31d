"""Chosen cases cover what they should: values and pairs, as often as asked, and no more cases than need be."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, product

import pytest

from tests.helpers import selection
from tests.helpers.selection import covering


@pytest.fixture(autouse=True)
def some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "FULL", False)


@pytest.mark.parametrize("times", [1, 2, 3])
def test_every_value_as_often_as_asked(times: int) -> None:
    cases = list(product("abcdef", range(9)))
    chosen = covering(cases, times=times)
    counts = Counter(part for case in chosen for part in enumerate(case))
    assert min(counts[part] for case in cases for part in enumerate(case)) >= times
    assert len(chosen) == 9 * times
    assert chosen == [case for case in cases if case in set(chosen)]


def test_every_pair_of_values() -> None:
    cases = [case for case in product("abc", range(3), (True, False), "xyz") if case[0] != "a" or case[2]]
    chosen = covering(cases, strength=2)
    pairs = {pair for case in cases for pair in combinations(enumerate(case), 2)}
    assert {pair for case in chosen for pair in combinations(enumerate(case), 2)} == pairs
    assert len(chosen) <= 14 < len(cases) == 45
