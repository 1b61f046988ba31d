"""Responses that reach the length limit: punishment, filter, and what the loop does with both."""

from __future__ import annotations

import pytest
import torch

from mega_rl.algorithms.advantages import GRPO
from mega_rl.algorithms.losses import AGGREGATIONS, Aggregation
from mega_rl.config.schema.rollout import OverlongConfig
from mega_rl.trainer.policy_gradient import MinibatchPlan, build_experience
from mega_rl.trainer.rows import narrowed, shaped_rewards, soft_punishment
from mega_rl.types import PER_TOKEN, Experience, RewardParts, Rewards, Rollout, TokenOutputs, ends_of
from tests.helpers.fakes import FakeRanks
from tests.helpers.rollouts import make_rollout

LENGTHS = [3, 8, 5, 8, 7, 6, 2, 8]
TRUNCATED = torch.tensor([False, True, False, False, False, False, False, True])  # one of full length ended by itself


def sampled() -> tuple[Rollout, Rewards]:
    """(four samples of each of two prompts, at most 8 tokens long, their rewards)."""
    rollout = make_rollout(LENGTHS, samples=4)
    rollout.end = ends_of(~TRUNCATED)
    return rollout, Rewards(torch.rand(len(LENGTHS), generator=torch.Generator().manual_seed(2)))


def experience_of(rollout: Rollout, rewards: Rewards) -> Experience:
    return build_experience(
        rollout,
        rewards,
        outputs=(
            TokenOutputs(logprobs=rollout.rollout_logprobs),
            TokenOutputs(),
            TokenOutputs(values=0.3 * rollout.rollout_logprobs),
        ),
        estimator=GRPO(),
        sum_over_ranks=FakeRanks().sum,
    )


@pytest.mark.parametrize(("limit", "buffer"), [(20, 5), (20, 1), (7, 6), (16384, 4096)])
def test_the_punishment_is_that_of_the_paper(limit: int, buffer: int) -> None:
    """Equation 13 case by case in float64; to the last bit of a float32."""
    lengths = sorted({0, 1, limit // 2, limit - buffer, limit - buffer + 1, limit - buffer // 2, limit - 1, limit})
    expected = []
    for length in lengths:
        if length <= limit - buffer:
            expected.append(0.0)
        elif length <= limit:
            expected.append(((limit - buffer) - length) / buffer)
        else:
            expected.append(-1.0)
    actual = soft_punishment(torch.tensor(lengths), limit=limit, buffer=buffer)
    torch.testing.assert_close(actual, torch.tensor(expected), rtol=6e-8, atol=0)
    assert actual[-1] == -1.0
    assert actual.min() >= -1.0


def test_rewards_fall_over_the_last_tokens() -> None:
    """By all tokens that the limit counts, what a tool wrote too; a failed sample loses nothing."""
    rollout, rewards = sampled()
    rollout.failed = torch.arange(len(LENGTHS)) == 6
    rollout.loss_mask[6], rollout.lengths[6] = False, rollout.prompt_lengths[6]
    rollout.loss_mask[1, 3:7] = False  # the answer of a tool
    overlong = OverlongConfig(buffer_tokens=4, penalty=2.0)
    shaped, metrics = shaped_rewards(rollout, rewards, FakeRanks(), overlong, max_response_tokens=8)
    expected = [0.0, -2.0, -0.5, -2.0, -1.5, -1.0, 0.0, -2.0]
    torch.testing.assert_close(shaped.totals - rewards.totals, torch.tensor(expected), rtol=0, atol=2e-7)
    assert metrics == {"reward/overlong_punishment_mean": pytest.approx(sum(expected) / 7)}


@pytest.mark.parametrize("aggregation", AGGREGATIONS.values())
def test_the_filter_leaves_no_token_and_no_denominator(aggregation: Aggregation) -> None:
    """The others have the advantages of the whole group, and loss weights as if the filtered rows were not there."""
    rollout, rewards = sampled()
    overlong = OverlongConfig(filter=True)
    _, metrics = shaped_rewards(rollout, rewards, FakeRanks(), overlong, max_response_tokens=8)
    assert metrics == {"rollout/filtered_fraction": 0.25}
    whole = experience_of(rollout, rewards)
    filtered = narrowed(experience_of(rollout, rewards), rollout.finished[:, None])
    kept = (~TRUNCATED).nonzero().flatten()
    for name in (*PER_TOKEN, "loss_mask", "rows"):
        assert not getattr(filtered, name)[TRUNCATED].any()
        assert torch.equal(getattr(filtered, name)[kept] != 0, getattr(whole, name)[kept] != 0)
    assert torch.equal(filtered.advantages[kept], whole.advantages[kept])
    plan = MinibatchPlan(2, epochs=1, aggregation=aggregation, max_response_tokens=8, seed=0, ranks=FakeRanks())
    (actual,) = plan.cut(filtered, num_prompts=2, step=0)
    (expected,) = plan.cut(whole[kept], num_prompts=2, step=0)  # type: ignore[index]
    trains = actual.loss_mask.any(dim=1)
    for name in ("loss_weights", "token_weights"):
        assert torch.equal(getattr(actual, name)[trains], getattr(expected, name))
        assert not getattr(actual, name)[~trains].any()


def test_rewards_of_parts_get_the_punishment_as_a_part() -> None:
    """From 0 to -1 with the penalty as its weight, so that the weighted sum is the punished reward."""
    rollout, rewards = sampled()
    parts = RewardParts(("a",), (1.0,), rewards.totals[:, None])
    rewards, overlong = Rewards(rewards.totals, parts), OverlongConfig(buffer_tokens=4, penalty=2.0)
    shaped, _ = shaped_rewards(rollout, rewards, FakeRanks(), overlong, max_response_tokens=8)
    assert shaped.parts is not None
    assert (shaped.parts.names, shaped.parts.weights) == (("a", "overlong"), (1.0, 2.0))
    torch.testing.assert_close(shaped.parts.values @ torch.tensor(shaped.parts.weights), shaped.totals)
    assert (shaped.totals < rewards.totals).sum() == 6
