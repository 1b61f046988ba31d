"""Hints when the responses to every prompt get the same reward, step after step, or none."""

from __future__ import annotations

import logging

import pytest

from mega_rl.trainer.events import FLAT_STEPS, AbsentRewards, FlatRewards, GradientSpikes
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


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        ({"rollout/filtered_fraction": 1.0, EQUAL_GROUPS: 1.0}, "reward.overlong.filter=true"),
        ({"rollout/filtered_fraction": 0.75, EQUAL_GROUPS: 0.0}, "(rollout/filtered_fraction=0.75"),
    ],
)
def test_a_run_in_which_nothing_trains_says_why(
    caplog: pytest.LogCaptureFixture, step: dict[str, float], reason: str
) -> None:
    hint = FlatRewards()
    idle = {"reward/mean": 0.25, "advantage/abs_mean": 0.0, **step}
    for metrics in [*[idle] * (FLAT_STEPS - 1), {**idle, "advantage/abs_mean": 0.5, EQUAL_GROUPS: 0.0}]:
        hint(metrics)
    assert caplog.messages == []
    for _ in range(9):
        hint(idle)
    [line] = caplog.messages
    assert reason in line


def test_a_gradient_a_hundred_times_the_median_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """By the largest update of a step, however small the step's mean; not before the run has a median."""
    hint = GradientSpikes()
    usual = {"actor/grad_norm": 2.0, "actor/grad_norm_max": 3.0}
    spike = {"actor/grad_norm": 80.0, "actor/grad_norm_max": 201.0}
    for metrics in [spike, *[usual] * FLAT_STEPS, {}]:
        hint(metrics)
    assert caplog.messages == []
    hint(spike)
    hint(usual)
    [line] = caplog.messages
    assert line.startswith("an update's gradient norm is 201, the run's median is 2:")


def test_a_step_without_any_reward_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    hint = AbsentRewards()
    caplog.set_level(logging.INFO)
    for metrics in ({}, {"reward/masked_fraction": 0.75, "reward/mean": 1.0}):
        hint(metrics)
    assert caplog.messages == []
    for _ in range(3):
        hint({"reward/masked_fraction": 1.0, "reward/errors": 0.0})
    [line] = caplog.messages
    assert line == (
        "reward/masked_fraction=1: every response of the step was left out, so that there is nothing to learn from; "
        "the reward returns None for all of them"
    )


def test_a_step_whose_responses_all_fail_names_the_setting(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    AbsentRewards()({"reward/masked_fraction": 1.0, "reward/crashes": 3.0})
    assert caplog.messages[0].endswith(" or fails, with reward.pool.on_failure=mask: look at the warnings above")
