"""Curves of a report: every metric of every run over one common grid of steps, thin enough for a page.

A grid has one column for each step, or, of long runs, for several neighbouring steps. Each column keeps the mean of its
values, and their minimum and maximum, so that a spike of a single step stays in sight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mega_rl.report.runs import Run, Series
from mega_rl.storage.strict_json import JsonFields

MAX_CHARACTERS = 1_000_000  # of all curves together, about
MAX_COLUMNS, MIN_COLUMNS = 1000, 20
_CHARACTERS_OF_A_COLUMN = 26  # mean, minimum and maximum of four digits
DIGITS = 4


@dataclass(frozen=True)
class Grid:
    """Columns of equal width that cover the steps of all runs."""

    first: int  # step
    width: int  # steps of a column
    columns: int

    def column(self, step: int) -> int:
        """Return the column of a step."""
        return (step - self.first) // self.width

    def to_json(self) -> dict[str, int]:
        """Return the grid for the page."""
        return {"first": self.first, "width": self.width, "columns": self.columns}


def make_grid(runs: Sequence[Run], *, max_characters: int = MAX_CHARACTERS) -> Grid:
    """Return the finest grid whose curves of all runs take about `max_characters` of JSON at most."""
    curves = [series for run in runs for series in run.series.values()]
    first = min((series.steps[0] for series in curves), default=0)
    last = max((series.steps[-1] for series in curves), default=0)
    room = max_characters // (_CHARACTERS_OF_A_COLUMN * max(len(curves), 1))
    columns = min(max(room, MIN_COLUMNS), MAX_COLUMNS)
    width = max(1, math.ceil((last - first + 1) / columns))
    return Grid(first, width, (last - first) // width + 1)


def thin(series: Series, grid: Grid) -> JsonFields:
    """Return a curve for the page.

    `at` are the columns with values, `mean` their means; `low` and `high` are there where a column holds several steps.
    `bad` lists columns with values that are NaN or infinite, which count in nothing else.
    """
    columns: dict[int, list[float]] = {}
    bad: set[int] = set()
    for step, value in zip(series.steps, series.values, strict=True):
        if math.isfinite(value):
            columns.setdefault(grid.column(step), []).append(value)
        else:
            bad.add(grid.column(step))
    at = sorted(columns)
    curve: JsonFields = {"at": None if at == list(range(grid.columns)) else at}
    curve["mean"] = [shorten(math.fsum(columns[column]) / len(columns[column])) for column in at]
    if grid.width > 1:
        curve["low"] = [shorten(min(columns[column])) for column in at]
        curve["high"] = [shorten(max(columns[column])) for column in at]
    if bad:
        curve["bad"] = sorted(bad)
    return curve


def shorten(value: float) -> float | int:
    """Return a value of four significant digits, whole numbers below ten million as they are."""
    if abs(value) < 1e7 and value == int(value):
        return int(value)
    return float(f"{value:.{DIGITS}g}")
