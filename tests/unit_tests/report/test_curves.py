"""Thinning of curves: a page stays small, and no extreme is lost."""

from __future__ import annotations

import math
from array import array
from pathlib import Path

import pytest

from mega_rl.report.curves import Grid, make_grid, shorten, thin
from mega_rl.report.runs import Run, Series


def run_of(*lengths: int) -> Run:
    curves = {f"x/{n}": Series(array("q", range(1, n + 1)), array("d", [0.5] * n)) for n in lengths}
    return Run(Path("run"), "run", curves, {})


def test_a_short_run_keeps_every_value() -> None:
    run = run_of(60)
    grid = make_grid([run])
    assert grid == Grid(1, 1, 60)
    assert thin(run.series["x/60"], grid) == {"at": None, "mean": [0.5] * 60}


def test_a_long_run_keeps_means_and_extremes() -> None:
    values = array("d", [math.sin(step / 1000) for step in range(100_000)])
    values[54_321] = 77.0
    values[4_321] = -55.0
    series = Series(array("q", range(1, 100_001)), values)
    grid = make_grid([Run(Path("run"), "run", {"x/y": series}, {})])
    curve = thin(series, grid)
    assert grid.columns <= 1000
    assert len(curve["mean"]) == len(curve["low"]) == len(curve["high"]) == grid.columns
    assert max(curve["high"]) == 77
    assert min(curve["low"]) == -55
    assert curve["high"].index(77) == grid.column(54_322)
    middle = grid.columns // 3
    inside = values[middle * grid.width : (middle + 1) * grid.width]
    assert curve["mean"][middle] == pytest.approx(sum(inside) / len(inside), rel=1e-3)  # four digits are kept


def test_runs_share_a_grid() -> None:
    grid = make_grid([run_of(10), run_of(5000)])
    assert grid.columns * grid.width >= 5000
    assert grid.column(5000) == grid.columns - 1


def test_more_curves_get_fewer_columns_each() -> None:
    assert make_grid([run_of(*range(2000, 2200))]).columns < make_grid([run_of(2000)]).columns


def test_values_that_are_not_finite_are_marked_and_count_in_nothing() -> None:
    series = Series(array("q", [1, 2, 3]), array("d", [1.0, math.nan, 3.0]))
    assert thin(series, Grid(1, 1, 3)) == {"at": [0, 2], "mean": [1, 3], "bad": [1]}


def test_runs_without_metrics_have_a_grid() -> None:
    assert make_grid([Run(Path("run"), "run", {}, {})]).columns == 1


def test_numbers_are_short() -> None:
    assert [shorten(value) for value in (0.123456, 12345.0, 1.23456e-9, -0.0)] == [0.1235, 12345, 1.235e-09, 0]
