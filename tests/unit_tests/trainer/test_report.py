"""Numbers of a step that come from its rollouts."""

from __future__ import annotations

import pytest
import torch

from mega_rl.trainer.report import rollout_metrics
from mega_rl.types import Rollout
from tests.helpers.fakes import FakeRanks


def rollout_of(prompt_index: list[int]) -> Rollout:
    """Rows of one token of a prompt and one of a response."""
    rows = len(prompt_index)
    return Rollout(
        tokens=torch.ones(rows, 2, dtype=torch.int64),
        loss_mask=torch.tensor([[False, True]] * rows),
        prompt_lengths=torch.ones(rows, dtype=torch.int64),
        lengths=torch.full((rows,), 2),
        rollout_logprobs=torch.zeros(rows, 2),
        finished=torch.ones(rows, dtype=torch.bool),
        prompt_index=torch.tensor(prompt_index),
        sample_index=torch.zeros(rows, dtype=torch.int64),
        weight_version=torch.zeros(rows, dtype=torch.int64),
        batch_size=[rows],
    )


@pytest.mark.parametrize(
    ("prompt_index", "rewards", "share"),
    [
        ([3, 3, 1, 1], [0.0, 0.0, 1.0, 1.0], 1.0),
        ([3, 3, 1, 1], [0.0, 1.0, 1.0, 1.0], 0.5),
        ([3, 1, 3, 1], [0.0, 1.0, 0.5, 2.0], 0.0),
        ([0, 1, 1], [5.0, 1.0, 1.0], 1.0),  # a prompt with one sample counts nowhere
    ],
)
def test_share_of_prompts_that_teach_grpo_nothing(prompt_index: list[int], rewards: list[float], share: float) -> None:
    metrics = rollout_metrics(rollout_of(prompt_index), torch.tensor(rewards), FakeRanks())
    assert metrics["reward/equal_groups_fraction"] == share


def test_one_sample_each_has_no_groups() -> None:
    metrics = rollout_metrics(rollout_of([0, 1]), torch.zeros(2), FakeRanks())
    assert "reward/equal_groups_fraction" not in metrics
