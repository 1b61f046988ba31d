"""Validations on fakes: draws of their own, several sets, estimates, and training that they leave as it is."""

from __future__ import annotations

import pytest
import torch

from mega_rl.errors import UserError
from mega_rl.trainer import RunSettings
from mega_rl.trainer.validation import Evaluation, EvaluationPlan, estimates_of, right_samples
from mega_rl.types import Draws, PromptSet, RewardParts, Rewards
from tests.helpers.fakes import FakePrompts
from tests.unit_tests.trainer.test_loop import make_trainer

PLAN = EvaluationPlan(Draws(4, 1.0), counted=(1, 4), right_above=0.2)


def test_each_set_has_its_numbers_in_the_run() -> None:
    prompts = FakePrompts().batch(0)
    evaluation = Evaluation([PromptSet("", prompts), PromptSet("few", prompts[:2])], PLAN)
    trainer = make_trainer(settings=RunSettings(steps=1, val_interval=1), validation=evaluation)
    trainer.fit()
    record = trainer.metrics.records[1]
    for area in ("val/", "val/few/"):
        assert record[f"{area}pass_at_1"] == pytest.approx(record[f"{area}avg_at_4"])
        assert record[f"{area}pass_at_1_low"] < record[f"{area}pass_at_1"] < record[f"{area}pass_at_1_high"]
        assert record[f"{area}pass_at_1"] <= record[f"{area}pass_at_4"]
        assert {f"{area}maj_at_1", f"{area}maj_at_4", f"{area}reward_mean"} <= record.keys()


def test_estimates_are_means_over_prompts_with_enough_samples() -> None:
    samples = [(0, True, "a"), (0, False, "b"), (1, False, "b"), (1, False, "b"), (2, True, "a")]
    estimates = estimates_of(samples, counted=(1, 2), n=2)
    assert estimates["pass_at_1"].mean == pytest.approx((0.5 + 0.0 + 1.0) / 3)
    assert (estimates["pass_at_2"].mean, estimates["pass_at_2"].prompts) == (0.5, 2)
    assert estimates["maj_at_2"].mean == pytest.approx((0.5 + 0.0) / 2)
    assert estimates["avg_at_2"].prompts == 3


def test_a_part_may_say_what_is_right() -> None:
    values = torch.tensor([[1.0, 0.0], [0.0, 3.0]])
    rewards = Rewards(values.sum(dim=1), RewardParts(("correct", "style"), (1.0, 1.0), values))
    assert right_samples(rewards, above=0.5, part="correct") == [True, False]
    assert right_samples(rewards, above=0.5, part="") == [True, True]
    with pytest.raises(UserError, match=r"validation.right_part=other has no effect: the reward has the parts correct"):
        right_samples(rewards, above=0.5, part="other")
    with pytest.raises(UserError, match="the reward is a number"):
        right_samples(Rewards(torch.ones(1)), above=0.5, part="correct")
