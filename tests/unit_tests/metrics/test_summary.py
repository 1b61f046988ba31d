"""The table at the end of a run."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
from rich.console import Console

from mega_rl.metrics.sinks import JsonlSink
from mega_rl.metrics.summary import show_summary, sparkline


def written(run: Path, *, terminal: bool) -> str:
    stream = io.StringIO()
    show_summary(run, console=Console(file=stream, force_terminal=terminal, width=80, color_system=None))
    return stream.getvalue()


def test_a_run_is_summed_up_from_its_files(tmp_path: Path) -> None:
    run = tmp_path / "run[1]"
    (run / "hf" / "step_000002").mkdir(parents=True)
    for step in (1, 2):
        (run / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
    sink = JsonlSink(run / "metrics.jsonl", resume_step=1)
    sink.log(0, {"val/reward_mean": 0.25})
    for step in (1, 2):
        sink.log(step, {"reward/mean": step / 4, "time/step_s": 40.0} | ({"val/reward_mean": 0.5} if step == 2 else {}))
    assert written(run, terminal=False).splitlines() == [
        "steps               2",
        "time in steps       1:20",
        "reward              0.2500 -> 0.5000  ▁█",
        "validation reward   0: 0.2500  2: 0.5000",
        f"metrics             {run}/metrics.jsonl",
        f"checkpoint          {run}/checkpoints/step_000002",
        f"Hugging Face model  {run}/hf/step_000002",
        f"export              mega-rl checkpoint export {run} FOLDER",
        f"page                mega-rl report {run}",
        f"plot                mega-rl plot {run}",
    ]
    framed = written(run, terminal=True)
    assert "│ reward             │ 0.2500 -> 0.5000  ▁█" in framed
    assert "run[1]" in framed.replace(" │\n│                    │ ", "")


@pytest.mark.parametrize("content", [b"\xb8\xff\x00\n", b"oops\n{}\n"], ids=["bytes", "text"])
def test_damaged_metrics_do_not_end_a_run_that_is_done(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(content)
    (tmp_path / "checkpoints" / "step_000002").mkdir(parents=True)
    text = written(tmp_path, terminal=False)
    assert "metrics.jsonl cannot be read" in text
    assert "step_000002" in text


def test_of_named_sets_alone_the_first_is_shown(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl", resume_step=1)
    sink.log(0, {"val/gsm8k/reward_mean": 0.25, "val/gsm8k/reward_style": 0.0, "val/math/reward_mean": 0.5})
    assert "validation reward of gsm8k  0: 0.2500" in written(tmp_path, terminal=False).splitlines()


def test_a_run_without_metrics_has_no_summary(tmp_path: Path) -> None:
    assert written(tmp_path, terminal=True) == ""


def test_a_sparkline_reaches_from_the_lowest_to_the_highest_value() -> None:
    assert sparkline([-1.0, 0.0, math.nan, 1.0]) == "▁▅█"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([]) == ""
    assert len(sparkline([float(value) for value in range(1000)])) == 36
