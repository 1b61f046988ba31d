"""The picture of a run."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from mega_rl.metrics.plot import plot_run, series
from mega_rl.metrics.sinks import JsonlSink


def write_run(path: Path, *, steps: int) -> None:
    sink = JsonlSink(path, resume_step=1)
    sink.log(0, {"val/reward_mean": 0.1})
    for step in range(1, steps + 1):
        metrics = {"reward/mean": step / steps, "actor/loss": math.nan if step == 2 else 0.1, "time/step_s": 1.0}
        sink.log(step, metrics | ({"val/reward_mean": 0.9} if step == steps else {}))


def test_series_are_by_metric_in_step_order(tmp_path: Path) -> None:
    write_run(tmp_path / "metrics.jsonl", steps=3)
    points = series(tmp_path / "metrics.jsonl")
    assert points["val/reward_mean"] == [(0, 0.1), (3, 0.9)]
    assert points["reward/mean"] == [(1, 1 / 3), (2, 2 / 3), (3, 1.0)]


def test_plot_is_a_png_also_with_values_that_are_no_numbers(tmp_path: Path) -> None:
    write_run(tmp_path / "metrics.jsonl", steps=4)
    png = plot_run(tmp_path / "metrics.jsonl", tmp_path / "plots" / "run.png")
    data = png.read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) > 10_000


def test_nothing_to_draw_is_said(tmp_path: Path) -> None:
    JsonlSink(tmp_path / "metrics.jsonl", resume_step=1).log(1, {"sync/bytes": 1.0})
    with pytest.raises(ValueError, match="no metric to draw"):
        plot_run(tmp_path / "metrics.jsonl", tmp_path / "run.png")
