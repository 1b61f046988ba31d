"""The lines of metrics.jsonl, which stay valid JSON whatever a run computes."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mega_rl.errors import UserError

if TYPE_CHECKING:
    from mega_rl.types import Metrics

_NOT_FINITE = ("NaN", "Infinity", "-Infinity")


@dataclass
class StepMetrics:
    """The record of one trainer step, as written to metrics.jsonl."""

    step: int
    metrics: Metrics


@dataclass(frozen=True)
class Series:
    """One metric over a run; both arrays have the same length."""

    steps: array[int]
    values: array[float]  # may be NaN or infinite


def to_json_value(value: float) -> float | str:
    """Return the number, or its name as a string when JSON has no number for it."""
    return value if math.isfinite(value) else json.dumps(value)


def encode_step(step: int, metrics: Metrics) -> str:
    """Return one line, without its newline: {"step": 3, "reward/mean": 0.5}."""
    values = {name: to_json_value(float(value)) for name, value in metrics.items()}
    return json.dumps({"step": step, **values}, allow_nan=False)


def decode_step(line: str) -> StepMetrics:
    """Return the record of `encode_step`'s result; ValueError for any other line."""
    record: Any = json.loads(line)
    if not isinstance(record, dict) or not isinstance(step := record.pop("step", None), int):
        raise ValueError(f"not a metrics record: {line[:80]!r}")
    for value in record.values():
        if type(value) not in (int, float) and value not in _NOT_FINITE:
            raise ValueError(f"{value!r} is not a metric's value")
    return StepMetrics(step, {name: float(value) for name, value in record.items()})


def read_metrics(path: Path) -> Iterator[StepMetrics]:
    """Yield the records of a metrics.jsonl in order, without a last line that a crash tore.

    Raises ValueError, with the line number, for any other line that is not a record.
    """
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(keepends=True), start=1):
        try:
            yield decode_step(line)
        except ValueError as error:
            if not line.endswith("\n"):
                return
            raise ValueError(f"{path} line {number}: {error}") from error


def read_series(path: Path) -> dict[str, Series]:
    """Return every metric of a metrics.jsonl over its steps. Raises UserError for a damaged file."""
    series: dict[str, Series] = {}
    try:
        for record in read_metrics(path):
            for name, value in record.metrics.items():
                one = series.setdefault(name, Series(array("q"), array("d")))
                one.steps.append(record.step)
                one.values.append(value)
    except (OSError, ValueError, OverflowError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    return series


def held_out_reward(names: Iterable[str]) -> str | None:
    """Return the metric of the held-out reward, or None; the set without a name comes first."""
    rewards = [name for name in names if fnmatchcase(name, "val/*reward_mean") and name.count("/") <= 2]
    return min(rewards, key=lambda name: name.count("/"), default=None)
