"""Metrics of a step's optimizer steps, put together."""

from __future__ import annotations

from collections.abc import Sequence

from mega_rl.types import Metrics


def mean_metrics(updates: Sequence[Metrics]) -> Metrics:
    """Return the mean over a step's updates; the extreme for names in `_max` and `_min`, the sum for `_steps`."""
    merged: dict[str, list[float]] = {}
    for update in updates:
        for name, value in update.items():
            merged.setdefault(name, []).append(value)
    return {name: _merged(name, values) for name, values in merged.items()}


def _merged(name: str, values: Sequence[float]) -> float:
    for ending, merge in (("_max", max), ("_min", min), ("_steps", sum)):
        if name.endswith(ending):
            return float(merge(values))
    return sum(values) / len(values)
