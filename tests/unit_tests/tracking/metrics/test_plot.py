"""The picture of a run."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from mega_rl.cli.app import main
from mega_rl.tracking.metrics.plot import plot_runs, smoothed
from mega_rl.tracking.metrics.sinks import JsonlSink


def write_run(path: Path, *, steps: int) -> None:
    sink = JsonlSink(path, resume_step=1)
    sink.log(0, {"val/reward_mean": 0.1})
    for step in range(1, steps + 1):
        metrics = {"reward/mean": step / steps, "actor/loss": math.nan if step == 2 else 0.1, "time/step_s": 1.0}
        sink.log(step, metrics | ({"val/reward_mean": 0.9} if step == steps else {}))


def test_plot_draws_values_that_are_not_finite(tmp_path: Path) -> None:
    write_run(tmp_path / "metrics.jsonl", steps=4)
    picture = tmp_path / "plots" / "run.png"
    plot_runs({"": tmp_path / "metrics.jsonl"}, picture)
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) > 10_000


def test_command_draws_runs_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_run(tmp_path / name / "metrics.jsonl", steps=3)
    out = tmp_path / "both.svg"
    arguments = ["plot", str(tmp_path / "one"), str(tmp_path / "two"), "--out", str(out), "--metrics", "reward/mean"]
    assert main(arguments) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert out.read_text().count("<svg") == 1
    assert main(["plot", str(tmp_path / "one")]) == 0
    assert (tmp_path / "one" / "curves.png").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["empty"], "empty: has no metrics.jsonl; give the folder of a run (trainer.run_dir)"),
        (["nowhere"], "nowhere: no such file or folder; give the folder of a run (trainer.run_dir)"),
        (["run", "--metrics", "reward/men"], "--metrics: no run has reward/men; there are actor/loss, reward/mean,"),
        (["run", "--out", "run.gif"], "--out=run.gif: must end in .png, .svg, .pdf"),
        (["torn"], "torn/metrics.jsonl: cannot be read: torn/metrics.jsonl line 1: "),
    ],
)
def test_failed_plot_says_why(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "run", "torn"):
        Path(name).mkdir()
    write_run(Path("run/metrics.jsonl"), steps=2)
    Path("torn/metrics.jsonl").write_text("no json\n{}\n")
    assert main(["plot", *arguments]) == 2
    assert f"error: {message}" in capsys.readouterr().err


def test_smooth_curve_does_not_begin_at_zero() -> None:
    """Each value is the mean of those so far with weights 0.5 ** age; what is no number has no part in it."""
    assert smoothed([4.0, 2.0, math.nan, 0.0], 0.5) == pytest.approx([4.0, 8.0 / 3.0, 8.0 / 3.0, 8.0 / 7.0])
    assert smoothed([1.0, 5.0], 0.0) == [1.0, 5.0]
    assert math.isnan(smoothed([math.inf, 1.0], 0.5)[0])
