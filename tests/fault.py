"""A fault that tests/planted_faults.py plants."""

from __future__ import annotations

from dataclasses import dataclass

UNIT = "tests/unit_tests/"
# (area, test files below UNIT that must find the fault, perhaps with " -k EXPRESSION") -> (name, old, new) of each
Table = dict[tuple[str, ...], list[tuple[str, str, str]]]


@dataclass(frozen=True)
class Fault:
    """A silent fault. `old` stands exactly once in the package."""

    area: str
    name: str
    old: str
    new: str
    targets: tuple[str, ...]
