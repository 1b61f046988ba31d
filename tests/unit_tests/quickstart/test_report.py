"""What a quickstart says at its end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mega_rl.quickstart.report import print_table, summarize
from mega_rl.tracking.metrics.sinks import JsonlSink

STEPS = 12


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Metrics of twelve steps; the critic explains nothing in the first two, and 0.5 to 0.95 in the last ten."""
    sink = JsonlSink(tmp_path / "metrics.jsonl", resume_step=1)
    sink.log(0, {"val/reward_mean": 0.4, "val/reward_correct": 0.25})
    for step in range(1, STEPS + 1):
        metrics = {"reward/mean": 1.0, "values/explained_variance": -3.0 if step < 3 else 0.35 + step * 0.05}
        sink.log(step, metrics | ({"val/reward_mean": 1.9, "val/reward_correct": 0.99} if step == STEPS else {}))
    return tmp_path


def test_accuracy_is_the_share_of_right_answers_and_the_critic_is_judged_by_the_last_steps(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary, plot = summarize(run_dir, layout="megatron tp2-dp1", seed=3, train_s=1.0, warm_start_s=2.0, total_s=4.0)
    assert (summary.accuracy_before, summary.accuracy_after, summary.steps) == (0.25, 0.99, STEPS)
    assert summary.explained_variance == pytest.approx(0.725)  # the mean of 0.5, 0.55, ..., 0.95
    assert json.loads((run_dir / "summary.json").read_text())["explained_variance"] == summary.explained_variance
    print_table(summary, plot=plot)
    lines = [line for line in capsys.readouterr().out.splitlines() if "explained variance" in line]
    assert len(lines) == 1
    assert "0.72" in lines[0]


def test_a_run_without_a_critic_shows_its_validation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """pass@k and the parts of the reward, before and after."""
    sink = JsonlSink(tmp_path / "metrics.jsonl", resume_step=1)
    for step, (part, share) in enumerate(((0.25, 0.5), (0.75, 1.0))):
        shares = {"val/pass_at_4": share, "val/pass_at_4_low": 0.1, "val/maj_at_4": part, "val/reward_format": share}
        sink.log(step, {"val/reward_correct": part, "val/response_tokens_mean": 9.0, "reward/mean": part} | shares)
    summary, plot = summarize(tmp_path, layout="fsdp", seed=3, train_s=1.0, warm_start_s=2.0, total_s=4.0)
    assert summary.explained_variance is None
    assert summary.validation == {
        "val/maj_at_4": (0.25, 0.75), "val/pass_at_4": (0.5, 1.0),
        "val/reward_correct": (0.25, 0.75), "val/reward_format": (0.5, 1.0),
    }  # fmt: skip
    print_table(summary, plot=plot)
    text = capsys.readouterr().out
    for line in ("held-out pass@4", "50.0% before training, 100.0% after", "correct", "in the right format"):
        assert line in text
    assert "critic" not in text
