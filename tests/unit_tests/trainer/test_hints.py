"""Hints for runs that learn nothing."""

from __future__ import annotations

import logging

import pytest

from mega_rl.trainer.events import FLAT_STEPS, Warn
from mega_rl.trainer.loop import StepLog
from mega_rl.trainer.step_metrics import EQUAL_GROUPS
from mega_rl.types import Metrics
from tests.helpers.fakes import FakeSink, FakeTimer

MEAN = {"reward/mean": 0.25}
FLAT, SPREAD = {EQUAL_GROUPS: 1.0, **MEAN}, {EQUAL_GROUPS: 0.5, **MEAN}
IDLE = {**MEAN, "advantage/abs_mean": 0.0}
CUT, HALF = (
    {**IDLE, "rollout/filtered_fraction": share, EQUAL_GROUPS: equal} for share, equal in ((1.0, 1.0), (0.75, 0.0))
)
LEARNS = {**MEAN, "advantage/abs_mean": 0.5, EQUAL_GROUPS: 0.0}
MASKED = {"reward/masked_fraction": 1.0}
ALL_FLAT = f"in each of {FLAT_STEPS} steps all responses to a prompt got the same reward (0.25 on average)"


@pytest.mark.parametrize(
    ("silent", "steps", "line"),
    [
        ([*[FLAT] * (FLAT_STEPS - 1), SPREAD, *[FLAT] * (FLAT_STEPS - 1)], [FLAT] * 9, ALL_FLAT),
        ([*[CUT] * (FLAT_STEPS - 1), LEARNS], [CUT] * 9, "(rollout/filtered_fraction=1,"),
        ([*[HALF] * (FLAT_STEPS - 1), LEARNS], [HALF] * 9, "(rollout/filtered_fraction=0.75"),
        (
            [{}, {"reward/masked_fraction": 0.75, "reward/mean": 1.0}],
            [MASKED] * 3,
            "left out every response of the step",
        ),
    ],
)
def test_hint_is_logged_once(
    caplog: pytest.LogCaptureFixture, silent: list[Metrics], steps: list[Metrics], line: str
) -> None:
    caplog.set_level(logging.INFO)
    hints = Warn(StepLog(FakeSink(), FakeTimer()))
    for metrics in silent:
        hints.hint(metrics)
    assert caplog.messages == []
    for metrics in steps:
        hints.log.metrics = metrics
        hints.after(1, object())  # type: ignore[arg-type]
    [message] = caplog.messages
    assert line in message
