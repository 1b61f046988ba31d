"""Hints when the responses to every prompt get the same reward, step after step, or none."""

from __future__ import annotations

import logging

import pytest

from mega_rl.trainer.hints import FLAT_STEPS, AbsentRewards, FlatRewards
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
