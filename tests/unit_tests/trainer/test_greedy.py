"""Rewards of greedy responses by prompt."""

from __future__ import annotations

from typing import Any

import torch

from mega_rl.algorithms.advantages import ESTIMATORS
from mega_rl.trainer.collect import SamplingPlan
from mega_rl.trainer.policy_gradient import build_experience
from mega_rl.types import Rewards, Rollout, TokenOutputs
from tests.helpers.fakes import FakePolicy, FakeRanks, FakeReward
from tests.helpers.loops import FakeRun
from tests.helpers.rollouts import make_rollout


class PartlyFailing(FakePolicy):
    """A sampler whose greedy responses to some prompts fail."""

    failing: tuple[int, ...] = ()

    def generate(self, prompts: Any, *, step: int, greedy: bool = False, draws: Any = None) -> Rollout:
        rows = super().generate(prompts, step=step, greedy=greedy, draws=draws)
        if greedy:
            rows.failed = torch.isin(rows.prompt_index, torch.tensor(self.failing, dtype=torch.int64))
            rows.loss_mask &= ~rows.failed[:, None]
        return rows


class NumberedReward(FakeReward):
    """A reward of 0.5 for prompt 0, 1.5 for prompt 1, and so on."""

    def score(self, rollout: Rollout, prompts: Any) -> Rewards:
        return Rewards(rollout.prompt_index + 0.5)


def test_greedy_rewards_are_known_by_prompt() -> None:
    """Failed responses have none, and the mean is of the others; no mean divides by zero."""
    policy = PartlyFailing([])
    run = FakeRun(grpo=True, rollout=policy, actor=policy, sync=policy, reward=NumberedReward([]))
    run.plan = SamplingPlan(greedy=True)
    for policy.failing, expected, mean in (
        ((1,), [0.5, torch.nan, 2.5, 3.5], 6.5 / 3),
        ((0, 1, 2, 3), [torch.nan] * 4, 0),
    ):
        trainer = run.build()
        batch = trainer.batches.take(0)
        torch.testing.assert_close(batch.greedy, torch.tensor(expected), equal_nan=True)
        assert trainer.log.metrics["reward/greedy_mean"] == mean
    assert policy.events == ["validate", "generate"] * 2
    assert "baseline" in run.timer.phases


def test_each_row_is_compared_with_its_prompt() -> None:
    """The greedy response to prompt 0 and the last sample have failed."""
    rollout = make_rollout([2, 1, 2, 0])
    rollout.prompt_index = torch.tensor([1, 0, 3, 3])
    experience = build_experience(
        rollout,
        Rewards(torch.tensor([1.0, 2.0, 3.0, 4.0])),
        outputs=(TokenOutputs(logprobs=rollout.rollout_logprobs), TokenOutputs(), TokenOutputs()),
        estimator=ESTIMATORS["remax"](),
        sum_over_ranks=FakeRanks().sum,
        greedy=torch.tensor([torch.nan, -1.0, torch.nan, 0.5]),
    )
    assert experience.advantages[:, 2:].tolist() == [[2.0, 2.0], [0.0, 0.0], [2.5, 2.5], [0.0, 0.0]]
