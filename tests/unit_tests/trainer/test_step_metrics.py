"""Numbers of a step that come from its rollouts."""

from __future__ import annotations

import pytest
import torch

from mega_rl.trainer.step_metrics import experience_metrics, mean_metrics, rollout_metrics
from mega_rl.types import Experience, Rollout
from tests.helpers.fakes import FakeRanks


def rollout_of(prompt_index: list[int]) -> Rollout:
    """Rows of one token of a prompt and one of a response."""
    rows = len(prompt_index)
    return Rollout.from_rows(
        torch.ones(rows, 2, dtype=torch.int64),
        prompt_lengths=torch.ones(rows, dtype=torch.int64),
        lengths=torch.full((rows,), 2),
        prompt_index=torch.tensor(prompt_index),
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


def test_means_are_over_response_tokens() -> None:
    experience = Experience.from_rows(
        torch.ones(2, 3, dtype=torch.int64),
        prompt_lengths=torch.tensor([1, 2]),
        lengths=torch.tensor([3, 3]),
        values=torch.tensor([[9.0, 1.0, 2.0], [9.0, 9.0, 6.0]]),
    )
    assert experience_metrics(experience, FakeRanks(), has_reference=False, has_critic=True)["values/mean"] == 3.0


def test_updates_of_a_step_are_put_together() -> None:
    """A metric that an update lacks, because its step was skipped, has the mean of the others."""
    updates = [
        {"actor/grad_norm": 1.0, "actor/ratio_max": 3.0, "actor/skipped_steps": 0.0},
        {"actor/ratio_max": 2.0, "actor/skipped_steps": 1.0},
        {"actor/grad_norm": 2.0, "actor/ratio_max": 1.0, "actor/skipped_steps": 1.0},
    ]
    assert mean_metrics(updates) == {"actor/grad_norm": 1.5, "actor/ratio_max": 3.0, "actor/skipped_steps": 2.0}
