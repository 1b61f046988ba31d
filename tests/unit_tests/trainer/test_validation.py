"""Validations on fakes: draws of their own, several sets, estimates, and training that they leave as it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from mega_rl.errors import UserError
from mega_rl.trainer import RunSettings
from mega_rl.trainer.validation import Evaluation, EvaluationPlan, estimates_of, right_samples
from mega_rl.types import Draws, Prompt, PromptSet, RewardParts, Rewards, Rollout
from tests.helpers.fakes import FakePrompts, FakeReward
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


def test_dumped_samples_name_their_set() -> None:
    prompts = FakePrompts().batch(0)
    evaluation = Evaluation([PromptSet("", prompts), PromptSet("few", prompts[:2])], PLAN)
    settings = RunSettings(steps=1, val_interval=1, rollout_interval=1, rollout_samples=2)
    trainer = make_trainer(settings=settings, validation=evaluation)
    trainer.fit()
    assert [row["set"] for row in trainer.metrics.val_dumps[1]] == ["", "", "few", "few"]
    assert all("set" not in row for row in trainer.metrics.dumps[1])


def test_each_set_has_random_numbers_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = FakePrompts().batch(0)
    evaluation = Evaluation([PromptSet("one", prompts), PromptSet("two", prompts)], PLAN)
    trainer = make_trainer(settings=RunSettings(steps=1, val_interval=1), validation=evaluation)
    streams = []
    generate = trainer.rollout.generate

    def noting(prompts: Sequence[Prompt], *, draws: Draws, **more: Any) -> Rollout:
        streams.append(draws.stream)
        return generate(prompts, draws=draws, **more)

    monkeypatch.setattr(trainer.rollout, "generate", noting)
    trainer._validate(0)
    trainer._validate(1)
    assert streams[:2] == streams[2:]
    assert streams[0] != streams[1]


class MaskingReward(FakeReward):
    """Leaves out every second sample; all others are right."""

    def score(self, rollout: Rollout, prompts: Sequence[Prompt]) -> Rewards:
        totals = torch.ones(len(rollout.lengths))
        totals[1::2] = math.nan
        return Rewards(totals)


def test_samples_without_a_reward_are_in_no_estimate() -> None:
    """Of four samples two are left: pass@4 is of no prompt, and both are right."""
    evaluation = Evaluation([PromptSet("", FakePrompts().batch(0))], PLAN)
    trainer = make_trainer(settings=RunSettings(steps=1, val_interval=1), validation=evaluation)
    trainer.reward = MaskingReward([])
    record = trainer._validate(0)
    assert (record["val/avg_at_4"], record["val/pass_at_1"]) == (1.0, 1.0)
    assert record["val/reward_masked_fraction"] == 0.5
    assert "val/pass_at_4" not in record


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
