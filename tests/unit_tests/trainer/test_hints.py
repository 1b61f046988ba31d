"""The hint for runs that learn nothing."""

from __future__ import annotations

import logging

import pytest

from mega_rl.trainer.events import IDLE_STEPS, MASKED, Warn
from mega_rl.trainer.loop import StepLog
from mega_rl.trainer.step_metrics import EQUAL_GROUPS
from mega_rl.types import Metrics
from tests.helpers.fakes import FakeSink, FakeTimer

MEAN = {"reward/mean": 0.25}
LEARNS = {**MEAN, "advantage/abs_mean": 0.5, EQUAL_GROUPS: 0.0}


@pytest.mark.parametrize(
    ("idle", "numbers"),
    [
        ({**MEAN, EQUAL_GROUPS: 1.0}, "(reward/equal_groups_fraction=1, reward/masked_fraction=0, "),
        ({**MEAN, "advantage/abs_mean": 0.0, "rollout/filtered_fraction": 0.75}, "rollout/filtered_fraction=0.75)"),
        ({MASKED: 1.0}, "reward/masked_fraction=1, "),
    ],
)
def test_hint_is_logged_once(caplog: pytest.LogCaptureFixture, idle: Metrics, numbers: str) -> None:
    caplog.set_level(logging.INFO)
    hints = Warn(StepLog(FakeSink(), FakeTimer()))
    for metrics in [*[idle] * (IDLE_STEPS - 1), LEARNS, *[idle] * (IDLE_STEPS - 1), {}, *[idle] * 9]:
        hints.log.metrics = metrics
        hints.after(1, object())  # type: ignore[arg-type]
    [message] = caplog.messages
    assert numbers in message
