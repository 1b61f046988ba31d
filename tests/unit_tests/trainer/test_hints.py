"""Hints for runs that learn nothing, and warnings of gradients that one token dominates."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from mega_rl.trainer.events import FLAT_STEPS, AbsentRewards, FlatRewards, GradientSpikes
from mega_rl.trainer.step_metrics import EQUAL_GROUPS
from mega_rl.types import Metrics

MEAN = {"reward/mean": 0.25}
FLAT, SPREAD = {EQUAL_GROUPS: 1.0, **MEAN}, {EQUAL_GROUPS: 0.5, **MEAN}
IDLE = {**MEAN, "advantage/abs_mean": 0.0}
CUT, HALF = (
    {**IDLE, "rollout/filtered_fraction": share, EQUAL_GROUPS: equal} for share, equal in ((1.0, 1.0), (0.75, 0.0))
)
LEARNS = {**MEAN, "advantage/abs_mean": 0.5, EQUAL_GROUPS: 0.0}
USUAL = {"actor/grad_norm": 2.0, "actor/grad_norm_max": 3.0}
SPIKE = {"actor/grad_norm": 80.0, "actor/grad_norm_max": 201.0}
MASKED = {"reward/masked_fraction": 1.0}
ALL_FLAT = f"in each of {FLAT_STEPS} steps all responses to a prompt got the same reward (0.25 on average)"


@pytest.mark.parametrize(
    ("hint", "silent", "steps", "line"),
    [
        (FlatRewards, [*[FLAT] * (FLAT_STEPS - 1), SPREAD, *[FLAT] * (FLAT_STEPS - 1)], [FLAT] * 9, ALL_FLAT),
        (FlatRewards, [*[CUT] * (FLAT_STEPS - 1), LEARNS], [CUT] * 9, "reward.overlong.filter=true"),
        (FlatRewards, [*[HALF] * (FLAT_STEPS - 1), LEARNS], [HALF] * 9, "(rollout/filtered_fraction=0.75"),
        # By the largest update of a step, however small the step's mean; not before the run has a median.
        (
            GradientSpikes,
            [SPIKE, *[USUAL] * FLAT_STEPS, {}],
            [SPIKE, USUAL],
            "an update's gradient norm is 201, the run's median is 2:",
        ),
        (
            AbsentRewards,
            [{}, {"reward/masked_fraction": 0.75, "reward/mean": 1.0}],
            [{**MASKED, "reward/errors": 0.0}] * 3,
            "so that there is nothing to learn from; the reward returns None for all of them",
        ),
        (
            AbsentRewards,
            [],
            [{**MASKED, "reward/crashes": 3.0}],
            " or fails, with reward.source.on_failure=mask: look at the warnings above",
        ),
    ],
)
def test_a_hint_is_logged_once(
    caplog: pytest.LogCaptureFixture, hint: Callable[[], Any], silent: list[Metrics], steps: list[Metrics], line: str
) -> None:
    caplog.set_level(logging.INFO)
    say = hint()
    for metrics in silent:
        say(metrics)
    assert caplog.messages == []
    for metrics in steps:
        say(metrics)
    [message] = caplog.messages
    assert line in message
