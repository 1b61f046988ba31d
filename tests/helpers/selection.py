"""Cases of large tables: all of them in `make test-full`, and in `make test` some that cover every value and pair."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import combinations
from typing import TypeVar

import pytest

from mega_rl.converters.hf.config import release_problems

FULL = os.environ.get("MEGA_RL_TESTS") == "full"  # set by `make test-full`

Case = TypeVar("Case", bound=tuple[object, ...])
Value = TypeVar("Value")


def covering(cases: Iterable[Case], *, times: int = 1, strength: int = 1) -> list[Case]:
    """Return cases in which every value of every position stands at least `times` times, as far as all cases have it.

    With `strength=2` every pair of values of two positions counts instead: a covering array of the cases. Chosen
    greedily, with values used evenly, the same ones each time, in their order. `make test-full` gets all cases.
    """
    cases = list(cases)
    if FULL:
        return cases
    open_counts = Counter(part for case in cases for part in _parts(case, strength))
    missing = Counter({part: min(times, count) for part, count in open_counts.items()})
    left, chosen = list(range(len(cases))), []
    used: Counter[object] = Counter()

    def gain(i: int) -> tuple[int, int, int]:
        parts = _parts(cases[i], strength)
        return sum(missing[part] > 0 for part in parts), -sum(used[part] for part in enumerate(cases[i])), -i

    while any(missing.values()):
        best = max(left, key=gain)
        left.remove(best)
        used.update(enumerate(cases[best]))
        chosen.append(best)
        missing.subtract(part for part in _parts(cases[best], strength) if missing[part] > 0)
    return [cases[i] for i in sorted(chosen)]


def without(cases: Mapping[str, Value], *names: str) -> dict[str, Value]:
    """Return the cases but those of these names, which `make test-full` has, too; KeyError for a name of no case."""
    missing = [name for name in names if name not in cases]
    if missing:
        raise KeyError(f"no such case: {missing}")
    return {name: case for name, case in cases.items() if FULL or name not in names}


def on_megatron(family: str) -> pytest.MarkDecorator:
    """Skip a test on releases of Megatron-Core that lack the layers of a family."""
    problems = list(release_problems(family))
    return pytest.mark.skipif(bool(problems), reason=f"{' '.join(problems)[:90]}: make test-newest")


def _parts(case: tuple[object, ...], strength: int) -> list[tuple[tuple[int, object], ...]]:
    return list(combinations(enumerate(case), strength))
