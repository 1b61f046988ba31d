"""The line per step."""

from __future__ import annotations

import io
import logging
from unittest.mock import patch

import pytest
from rich.console import Console

from mega_rl.tracking.metrics import console
from mega_rl.tracking.metrics.console import ConsoleSink, step_line
from mega_rl.tracking.progress.terminal import TIME_WIDTH

METRICS = {
    "actor/loss": -0.00213,
    "actor/entropy": 1.25,
    "actor/lr": 2e-6,
    "reward/mean": 0.53125,
    "kl/ref": 0.0123,
    "actor/grad_norm": 0.87654,
    "rollout/response_tokens": 4000.0,
    "rollout/response_tokens_mean": 212.6,
    "rollout/finished_fraction": 0.97,
    "rollout/logprob_diff_max": 1.5e-6,
    "time/step_s": 4.5,
    "time/validate_s": 1.0,
    "time/checkpoint_s": 0.3,
    "advantage/mean": 0.0,
}
ALL = (
    "step 12 | reward 0.5312 | kl 0.0123 | length 213 | truncated 3% | entropy 1.250 | lr 2.0e-06 | grad 0.877 | "
    "1250 tok/s | 3.20 s | + 1.30 s val, save"
)


def test_line_holds_the_important_numbers() -> None:
    assert step_line(12, METRICS) == ALL
    assert step_line(0, {"val/reward_mean": 0.5}) == "step 0 | val 0.5000"
    assert step_line(0, {"val/math/reward_mean": 0.1, "val/b/reward_mean": 0.2}) == "step 0 | val 0.1000"
    assert step_line(0, {"val/math/reward_mean": 0.1, "val/reward_mean": 0.2}) == "step 0 | val 0.2000"


@pytest.mark.parametrize("width", [30, 60, 71, 91, 120])
def test_narrow_line_keeps_the_important_columns(width: int) -> None:
    line = step_line(12, METRICS, width=width)
    assert len(line) <= width
    assert line.startswith("step 12 | reward 0.5312")
    columns = iter(ALL.split(" | "))
    assert all(column in columns for column in line.split(" | ")), "in the order of the whole line"


def test_only_terminal_lines_are_narrowed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mega_rl")
    for terminal in (True, False):
        stream = Console(file=io.StringIO(), force_terminal=terminal, width=80)
        with patch.object(console, "standard_error", return_value=stream):
            ConsoleSink().log(12, METRICS)
    narrow, whole = (record.getMessage() for record in caplog.records)
    assert len(narrow) + TIME_WIDTH <= 80
    assert whole == ALL


def test_parts_get_columns_and_samples_are_shown(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mega_rl")
    row = {
        "step": 1, "prompt_index": 4, "sample_index": 0, "rendered_prompt": "p" * 900 + "END", "response": "5\n\x1b[2J",
        "reward": 1.5, "reward_exact": 1.0, "reward_style": None, "advantage_mean": 0.25, "response_tokens": 3,
        "finished": False,
    }  # fmt: skip
    sink = ConsoleSink(samples=1)
    for step in (1, 2):
        sink.dump_rollouts(step, [row, row])
        sink.log(step, METRICS | {"reward/exact": 0.75})
    head, prompt, response, *lines = (record.getMessage() for record in caplog.records)
    assert head == "step 1, prompt 4, sample 0: reward 1.5, exact 1, advantage 0.25; 3 tokens, cut off"
    assert prompt.endswith('END"')
    assert len(prompt) < 430
    assert response == '    response  "5\\n\\u001b[2J"'
    assert [line.partition("exact")[2][:6] for line in lines] == [" 0.750"] * 2
