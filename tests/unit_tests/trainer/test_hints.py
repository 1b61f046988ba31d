"""A hint when the responses to every prompt get the same reward, step after step."""

from __future__ import annotations

import logging

import pytest

from mega_rl.trainer.hints import FLAT_STEPS, FlatRewards
from mega_rl.trainer.step_metrics import EQUAL_GROUPS


def test_the_hint_comes_once_after_some_steps_in_a_row(caplog: pytest.LogCaptureFixture) -> None:
    hint = FlatRewards()
    caplog.set_level(logging.INFO)
    flat, spread = {EQUAL_GROUPS: 1.0, "reward/mean": 0.25}, {EQUAL_GROUPS: 0.5, "reward/mean": 0.25}
    for metrics in [*[flat] * (FLAT_STEPS - 1), spread, *[flat] * (FLAT_STEPS - 1)]:
        hint(metrics)
    assert caplog.messages == []
    for _ in range(9):
        hint(flat)
    [line] = caplog.messages
    assert line.startswith(
        f"in each of {FLAT_STEPS} steps all responses to a prompt got the same reward (0.25 on average)"
    )
