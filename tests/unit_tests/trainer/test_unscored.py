"""Samples that the reward leaves out (None) are as if they had not been drawn."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from mega_rl.algorithms.advantages import ESTIMATORS
from mega_rl.algorithms.kl import k1
from mega_rl.algorithms.losses.aggregation import AGGREGATIONS
from mega_rl.trainer.dumps import sample_rows
from mega_rl.trainer.experience import MinibatchPlan, build_experience
from mega_rl.trainer.greedy import WithGreedyRewards
from mega_rl.trainer.step_metrics import experience_metrics, part_metrics, rollout_metrics
from mega_rl.trainer.unscored import leave_unscored_out
from mega_rl.types import Experience, Prompt, RewardParts, Rewards, Rollout, TokenOutputs
from tests.helpers.fakes import FakeRanks
from tests.helpers.rollouts import make_rollout
from tests.unit_tests.trainer.test_loop import read_ids

# Two groups of four, of which the second loses one sample and the first two, and a third that loses all.
LENGTHS = [3, 5, 1, 4, 2, 6, 3, 2, 4, 4, 1, 5]
LEFT_OUT = torch.tensor([False, True, False, True, False, False, True, False, True, True, True, True])
SCORES = [1.0, 9.0, 0.0, -7.0, 0.25, 1.0, 30.0, 0.5, 5.0, 6.0, 7.0, 8.0]


class PenaltyOfOne:
    """In place of a KL penalty: one that differs from token to token."""

    def penalty(self, policy: Tensor, reference: Tensor) -> Tensor:
        return 0.1 * k1(policy, reference)


def batch() -> tuple[Rollout, Rewards]:
    """A rollout, and rewards of two parts whose rows have NaN where the reward said None."""
    rollout = make_rollout(LENGTHS, samples=4)
    parts = torch.stack([torch.tensor(SCORES), torch.arange(12.0) % 5], dim=1)
    parts[LEFT_OUT] = math.nan
    totals = parts[:, 0] + 0.5 * parts[:, 1]
    return rollout, Rewards(totals, RewardParts(("a", "b"), (1.0, 0.5), parts))


def without() -> tuple[Rollout, Rewards]:
    """The same batch as if those samples had not been drawn."""
    rollout, rewards = batch()
    rows = (~LEFT_OUT).nonzero().flatten()
    return rollout[rows], rewards[rows]  # type: ignore[index]


def experience_of(rollout: Rollout, rewards: Rewards, name: str) -> Experience:
    settings = {"distillation": {"reward_weight": 1.0}, "pass_at_k": {"k": 1, "right_above": 1.2}}.get(name, {})
    estimator = ESTIMATORS[name](**settings)
    kept, of_kept = leave_unscored_out(rollout, rewards)
    return build_experience(
        kept,
        of_kept,
        old=TokenOutputs(logprobs=kept.rollout_logprobs),
        ref=TokenOutputs(logprobs=1.3 * kept.rollout_logprobs),
        critic=TokenOutputs(values=0.3 * kept.rollout_logprobs),
        estimator=WithGreedyRewards(estimator, torch.tensor([0.5, 0.25, 1.0])),
        sum_over_ranks=FakeRanks().sum,
        reward_kl=PenaltyOfOne() if name in ("gae", "reinforce_plus_plus", "remax") else None,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("name", list(ESTIMATORS))
def test_advantages_targets_and_metrics_are_those_without_the_sample(name: str) -> None:
    """Of every estimator; sums of float64 have more zeros in them, which may show in a float32's last bit."""
    actual, expected = experience_of(*batch(), name), experience_of(*without(), name)
    assert expected.advantages.any()
    torch.testing.assert_close(actual.advantages[~LEFT_OUT], expected.advantages, rtol=2e-7, atol=1e-7)
    torch.testing.assert_close(actual.returns[~LEFT_OUT], expected.returns, rtol=2e-7, atol=1e-7)
    assert not actual.advantages[LEFT_OUT].any()
    assert not actual.returns[LEFT_OUT].any()
    assert not actual.loss_mask[LEFT_OUT].any()
    of_all, of_kept = (
        experience_metrics(experience, FakeRanks(), has_reference=True, has_critic=True)
        for experience in (actual, expected)
    )
    assert of_all == pytest.approx(of_kept, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("aggregation", list(AGGREGATIONS))
@pytest.mark.parametrize("name", ["grpo", "gae"])
def test_gradients_are_those_without_the_sample(name: str, aggregation: str) -> None:
    """Of sum(weight * advantage * logprob) and of the critic's error, for each token of the other samples."""
    gradients = []
    for rows in (batch(), without()):
        plan = MinibatchPlan(4, epochs=1, aggregation=AGGREGATIONS[aggregation], max_response_tokens=8, seed=0)
        (minibatch,) = plan.cut(experience_of(*rows, name), num_prompts=4, step=0, ranks=FakeRanks())
        kept = minibatch.loss_mask.any(dim=1)
        policy = minibatch.loss_weights * minibatch.advantages
        critic = minibatch.token_weights * (minibatch.values - minibatch.returns)
        order = (minibatch.prompt_index * 4 + minibatch.sample_index)[kept].argsort()
        gradients.append(torch.stack([policy[kept][order], critic[kept][order]]))
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-7)


def test_a_batch_that_keeps_all_its_samples_is_itself() -> None:
    rollout, rewards = without()
    assert leave_unscored_out(rollout, rewards) == (rollout, rewards)


def test_the_rollout_itself_stays_as_it_was() -> None:
    rollout, rewards = batch()
    tokens = int(rollout.loss_mask.sum())
    kept, _ = leave_unscored_out(rollout, rewards)
    assert int(rollout.loss_mask.sum()) == tokens > int(kept.loss_mask.sum())
    assert rollout.failed is None
    assert rewards.totals.isnan().any()


def test_metrics_of_rewards_are_of_the_samples_that_have_one() -> None:
    """Lengths are of all answers: the policy has sampled them."""
    (rollout, rewards), (kept, of_kept) = batch(), without()
    actual, expected = rollout_metrics(rollout, rewards, FakeRanks()), rollout_metrics(kept, of_kept, FakeRanks())
    assert actual["reward/masked_fraction"] == pytest.approx(7 / 12)
    assert expected["reward/masked_fraction"] == 0.0
    names = [name for name in expected if name.startswith("reward/") and name != "reward/masked_fraction"]
    assert len(names) >= 7
    assert {name: actual[name] for name in names} == pytest.approx({name: expected[name] for name in names})
    assert actual["rollout/sequences"] == 12
    assert part_metrics(rewards.parts, rollout, FakeRanks()) == part_metrics(of_kept.parts, kept, FakeRanks())


def test_a_batch_without_any_reward_trains_on_nothing() -> None:
    rollout, rewards = batch()
    rewards = dataclasses.replace(rewards, totals=torch.full_like(rewards.totals, math.nan))
    experience = experience_of(rollout, rewards, "grpo")
    assert not experience.loss_mask.any()
    metrics = rollout_metrics(rollout, rewards, FakeRanks())
    assert metrics["reward/masked_fraction"] == 1.0
    assert "reward/mean" not in metrics


def test_a_dump_has_null_in_the_place_of_the_reward() -> None:
    rollout, rewards = batch()
    prompts = [Prompt(index=i, token_ids=(2, 3), text=f"p{i}", answer="a") for i in range(3)]
    rows = sample_rows(rollout, rewards, prompts, read_ids, render=str, step=1, count=12)
    assert [row["reward"] is None for row in rows] == LEFT_OUT.tolist()
    assert rows[1]["reward_a"] is None
    assert rows[0]["reward_a"] == 1.0
    assert rows[1]["response_tokens"] == LENGTHS[1]
