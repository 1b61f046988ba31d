"""Summary and table at the end of a quickstart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mega_rl.cli.quickstart.run import summarize
from mega_rl.tracking.metrics.sinks import JsonlSink

STEPS = 12
SECONDS = {"train_s": 1.0, "warm_start_s": 2.0, "total_s": 4.0}


def test_critic_is_judged_by_the_last_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It explains nothing in the first two steps, and 0.5 to 0.95 in the last ten."""
    sink = JsonlSink(tmp_path / "metrics.jsonl", resume_step=1)
    sink.log(0, {"val/reward_mean": 0.4, "val/reward_correct": 0.25})
    for step in range(1, STEPS + 1):
        metrics = {"reward/mean": 1.0, "values/explained_variance": -3.0 if step < 3 else 0.35 + step * 0.05}
        sink.log(step, metrics | ({"val/reward_mean": 1.9, "val/reward_correct": 0.99} if step == STEPS else {}))
    summarize(tmp_path, layout="megatron tp2-dp1", seed=3, **SECONDS)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["accuracy_before"], summary["accuracy_after"], summary["steps"]) == (0.25, 0.99, STEPS)
    assert summary["explained_variance"] == pytest.approx(0.725)  # the mean of 0.5, 0.55, ..., 0.95
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "explained variance" in line]
    assert "0.72" in line


def test_group_relative_run_shows_its_validation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """pass@k and the parts of the reward, before and after."""
    sink = JsonlSink(tmp_path / "metrics.jsonl", resume_step=1)
    for step, (part, share) in enumerate(((0.25, 0.5), (0.75, 1.0))):
        shares = {"val/pass_at_4": share, "val/pass_at_4_low": 0.1, "val/maj_at_4": part, "val/reward_format": share}
        sink.log(step, {"val/reward_correct": part, "val/response_tokens_mean": 9.0, "reward/mean": part} | shares)
    summarize(tmp_path, layout="fsdp", seed=3, **SECONDS)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["explained_variance"] is None
    assert summary["validation"] == {
        "val/maj_at_4": [0.25, 0.75], "val/pass_at_4": [0.5, 1.0],
        "val/reward_correct": [0.25, 0.75], "val/reward_format": [0.5, 1.0],
    }  # fmt: skip
    text = capsys.readouterr().out
    for line in ("held-out pass_at_4", "50.0% before, 100.0% after", "reward_correct", "reward_format"):
        assert line in text
    assert "critic" not in text
