"""Samples that fail, or that the reward leaves out (None), are as if they had not been drawn."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mega_rl.algorithms.advantages import ESTIMATORS
from mega_rl.algorithms.kl import k1
from mega_rl.algorithms.losses import AGGREGATIONS
from mega_rl.trainer.events import sample_rows
from mega_rl.trainer.policy_gradient import MinibatchPlan, build_experience
from mega_rl.trainer.rows import Samples, leave_unscored_out
from mega_rl.trainer.step_metrics import experience_metrics, part_metrics, rollout_metrics
from mega_rl.types import Experience, Prompt, RewardParts, Rewards, Rollout, TokenOutputs
from tests.helpers.fakes import FakeRanks
from tests.helpers.loops import read_ids
from tests.helpers.rollouts import make_rollout

# Two groups of four: the second sample of the first group and two of the second are left out; a third group loses all.
LENGTHS = [3, 5, 1, 4, 2, 6, 3, 2, 4, 4, 1, 5]
LEFT_OUT = torch.tensor([False, True, False, True, False, False, True, False, True, True, True, True])
SCORES = [1.0, 9.0, 0.0, -7.0, 0.25, 1.0, 30.0, 0.5, 5.0, 6.0, 7.0, 8.0]
PROMPTS = [Prompt(index=i, token_ids=(2, 3), text=f"p{i}", answer="a") for i in range(3)]
KINDS = ("unscored", "failed")
Rows = tuple[Rollout, Rewards]


class PenaltyOfOne:
    """In place of a KL penalty: one that differs from token to token."""

    def penalty(self, policy: Tensor, reference: Tensor) -> Tensor:
        return 0.1 * k1(policy, reference)


def batch(kind: str) -> Rows:
    """Return a rollout, and rewards of two parts as the reward role gives them: NaN for None, 0 for failed samples."""
    parts = torch.stack([torch.tensor(SCORES), torch.arange(12.0) % 5], dim=1)
    if kind == "unscored":
        rollout = make_rollout(LENGTHS, samples=4)
        parts[LEFT_OUT] = math.nan
    else:
        rollout = make_rollout(torch.tensor(LENGTHS).masked_fill(LEFT_OUT, 0).tolist(), samples=4)
        rollout.failed = LEFT_OUT.clone()
        parts[LEFT_OUT] = 0.0
    return rollout, Rewards(parts[:, 0] + 0.5 * parts[:, 1], RewardParts(("a", "b"), (1.0, 0.5), parts))


def without(kind: str) -> Rows:
    """Return the same batch as if those samples had not been drawn."""
    rollout, rewards = batch(kind)
    rows = (~LEFT_OUT).nonzero().flatten()
    kept: Rollout = rollout[rows]  # type: ignore[index]
    kept.failed = None
    return kept, rewards[rows]


def experience_of(rows: Rows, name: str) -> Experience:
    settings = {"distillation": {"reward_weight": 1.0}, "pass_at_k": {"k": 1, "right_above": 1.2}}.get(name, {})
    kept, of_kept = leave_unscored_out(*rows)
    logprobs = kept.rollout_logprobs
    return build_experience(
        kept,
        of_kept,
        outputs=(TokenOutputs(logprobs), TokenOutputs(1.3 * logprobs), TokenOutputs(values=0.3 * logprobs)),
        estimator=ESTIMATORS[name](**settings),
        greedy=torch.tensor([0.5, 0.25, 1.0]),
        sum_over_ranks=FakeRanks().sum,
        reward_kl=PenaltyOfOne() if name in ("gae", "reinforce_plus_plus", "remax") else None,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("name", list(ESTIMATORS))
@pytest.mark.parametrize("kind", KINDS)
def test_the_others_learn_as_if_it_were_not_there(kind: str, name: str) -> None:
    """Advantages, targets and metrics; sums of float64 have more zeros in them, which may move a float32's last bit."""
    actual, expected = experience_of(batch(kind), name), experience_of(without(kind), name)
    assert expected.advantages.any()
    torch.testing.assert_close(actual.advantages[~LEFT_OUT], expected.advantages, rtol=2e-7, atol=1e-7)
    torch.testing.assert_close(actual.returns[~LEFT_OUT], expected.returns, rtol=2e-7, atol=1e-7)
    for field in (actual.advantages, actual.returns, actual.loss_mask):
        assert not field[LEFT_OUT].any()
    of_all, of_kept = (
        experience_metrics(experience, FakeRanks(), has_reference=True, has_critic=True)
        for experience in (actual, expected)
    )
    assert of_all == pytest.approx(of_kept, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("aggregation", list(AGGREGATIONS))
@pytest.mark.parametrize(("kind", "name"), [("unscored", "grpo"), ("unscored", "gae"), ("failed", "grpo")])
def test_gradients_are_those_without_the_sample(kind: str, name: str, aggregation: str) -> None:
    """Of sum(weight * advantage * logprob) and of the critic's error, for each token of the other samples."""
    gradients = []
    for rows in (batch(kind), without(kind)):
        plan = MinibatchPlan(4, 1, AGGREGATIONS[aggregation], max_response_tokens=8, seed=0, ranks=FakeRanks())
        (minibatch,) = plan.cut(experience_of(rows, name), num_prompts=4, step=0)
        kept = minibatch.loss_mask.any(dim=1)
        policy = minibatch.loss_weights * minibatch.advantages
        critic = minibatch.token_weights * (minibatch.values - minibatch.returns)
        order = (minibatch.prompt_index * 4 + minibatch.sample_index)[kept].argsort()
        width = 2 + max(LENGTHS)
        columns = [torch.nn.functional.pad(column, (0, width - column.size(1))) for column in (policy, critic)]
        gradients.append(torch.stack([column[kept][order] for column in columns]))
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-7)


def test_metrics_of_rewards_are_of_scored_samples() -> None:
    """Lengths cover all answers, because the policy has sampled them; failed samples are only in their own number."""
    (rollout, rewards), (kept, of_kept) = batch("unscored"), without("unscored")
    actual, expected = rollout_metrics(rollout, rewards, FakeRanks()), rollout_metrics(kept, of_kept, FakeRanks())
    assert actual["reward/masked_fraction"] == pytest.approx(7 / 12)
    assert expected["reward/masked_fraction"] == 0.0
    names = [name for name in expected if name.startswith("reward/") and name != "reward/masked_fraction"]
    assert len(names) >= 7
    assert {name: actual[name] for name in names} == pytest.approx({name: expected[name] for name in names})
    assert actual["rollout/sequences"] == 12
    assert part_metrics(rewards.parts, rollout, FakeRanks()) == part_metrics(of_kept.parts, kept, FakeRanks())
    metrics = rollout_metrics(*batch("failed"), FakeRanks())
    assert metrics.pop("rollout/failed_samples") == 7.0
    assert metrics == pytest.approx(rollout_metrics(*without("failed"), FakeRanks()), rel=1e-12, abs=1e-7)


def test_dumps_show_which_samples_do_not_count() -> None:
    def rows(kind: str) -> Any:
        return sample_rows(Samples(PROMPTS, *batch(kind), torch.arange(4)), read_ids, render=str, step=1, count=12)

    unscored, failed = rows("unscored"), rows("failed")
    assert [row["reward"] is None for row in unscored] == LEFT_OUT.tolist()
    assert (unscored[0]["reward_a"], unscored[1]["reward_a"]) == (1.0, None)
    assert unscored[1]["response_tokens"] == LENGTHS[1]
    assert "failed" not in unscored[0]
    assert [row["failed"] for row in failed] == LEFT_OUT.tolist()
    assert failed[1]["response"] == ""
