"""A fault that tests/planted_faults.py plants."""

from __future__ import annotations

from dataclasses import dataclass

UNIT = "tests/unit_tests/"


@dataclass(frozen=True)
class Fault:
    """A silent fault. `old` stands exactly once in the package; a target is a file, and perhaps " -k EXPRESSION"."""

    area: str
    name: str
    old: str
    new: str
    targets: tuple[str, ...]
    gap: str = ""  # why no test finds it yet


def fault(area: str, name: str, old: str, new: str, *targets: str, gap: str = "") -> Fault:
    """Return a fault whose targets are below tests/unit_tests."""
    return Fault(area, name, old, new, tuple(UNIT + target for target in targets), gap)
