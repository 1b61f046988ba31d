"""Rewards of greedy responses by prompt."""

from __future__ import annotations

import torch

from mega_rl.algorithms.advantages import ESTIMATORS
from mega_rl.algorithms.advantages.base import AdvantageInputs
from mega_rl.trainer.greedy import WithGreedyRewards, greedy_metrics, greedy_rewards
from mega_rl.types import Experience
from tests.helpers.fakes import FakeRanks
from tests.helpers.rollouts import make_rollout


def test_a_row_is_compared_with_the_greedy_response_to_its_prompt() -> None:
    """Prompts 3, 0 and 1 of four are this replica's, and the greedy response to prompt 0 has failed."""
    greedy = make_rollout([2, 0, 1])
    greedy.prompt_index = torch.tensor([3, 0, 1])
    rewards = greedy_rewards(greedy, torch.tensor([0.5, 0.0, -1.0]), num_prompts=4)
    torch.testing.assert_close(rewards, torch.tensor([torch.nan, -1.0, torch.nan, 0.5]), equal_nan=True)
    assert greedy_metrics(rewards, FakeRanks()) == {"reward/greedy_mean": -0.25}
    one = torch.ones(4, dtype=torch.int64)
    experience = Experience.from_rows(
        torch.ones(4, 3, dtype=torch.int64),
        prompt_lengths=one,
        lengths=torch.tensor([3, 2, 3, 1]),  # the last sample has failed, too
        prompt_index=torch.tensor([1, 0, 3, 3]),
    )
    inputs = AdvantageInputs(experience, torch.tensor([1.0, 2.0, 3.0, 4.0]), None, lambda x: x)
    advantages, _ = WithGreedyRewards(ESTIMATORS["remax"](), rewards)(inputs)
    assert advantages.tolist() == [[0.0, 2.0, 2.0], [0.0, 0.0, 0.0], [0.0, 2.5, 2.5], [0.0, 0.0, 0.0]]


def test_no_greedy_response_at_all() -> None:
    rewards = greedy_rewards(make_rollout([0]), torch.zeros(1), num_prompts=2)
    assert greedy_metrics(rewards, FakeRanks()) == {"reward/greedy_mean": 0.0}
