"""Numbers of a step that come from its rollouts."""

from __future__ import annotations

import pytest
import torch

from mega_rl.trainer.step_metrics import experience_metrics, mean_metrics, rollout_metrics
from mega_rl.types import Experience, Rewards, Rollout
from tests.helpers.fakes import FakeRanks
from tests.helpers.rollouts import make_rollout


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
    metrics = rollout_metrics(rollout_of(prompt_index), Rewards(torch.tensor(rewards)), FakeRanks())
    assert metrics["reward/equal_groups_fraction"] == share


def test_without_a_reward_there_are_lengths_alone() -> None:
    """The same numbers as beside a reward, and none of rewards; a sample that failed is in neither."""
    rollout = rollout_of([0, 0, 1, 1])
    rollout.failed = torch.tensor([False, True, False, False])
    beside = rollout_metrics(rollout, Rewards(torch.rand(4)), FakeRanks())
    alone = rollout_metrics(rollout, Rewards(torch.zeros(4), scored=False), FakeRanks())
    assert alone == {
        name: value
        for name, value in beside.items()
        if not name.startswith(("reward/", "rollout/right_", "rollout/wrong_"))
    }
    assert len(alone) == 14


def test_a_tools_answer_is_no_response_token() -> None:
    rollout = make_rollout([4, 3], prompt_tokens=2)
    rollout.loss_mask[0, 3:5] = False
    metrics = rollout_metrics(rollout, Rewards(torch.zeros(2)), FakeRanks())
    names = ("response_tokens", "response_tokens_mean", "response_tokens_max", "tokens")
    assert [metrics[f"rollout/{name}"] for name in names] == [5, 2.5, 3, 11]


def test_means_are_over_response_tokens() -> None:
    experience = Experience.from_rows(
        torch.ones(2, 3, dtype=torch.int64),
        prompt_lengths=torch.tensor([1, 2]),
        lengths=torch.tensor([3, 3]),
        values=torch.tensor([[9.0, 1.0, 2.0], [9.0, 9.0, 6.0]]),
    )
    assert experience_metrics(experience, FakeRanks(), has_reference=False, has_critic=True)["values/mean"] == 3.0


def test_means_of_updates_are_weighted_by_their_tokens() -> None:
    """Not by the number of updates: one without a token has no share, and a learning rate is not of tokens."""
    updates = [
        {"actor/entropy": 2.0, "actor/lr": 0.1, "actor/trained_tokens": 30.0, "actor/skipped_steps": 0.0},
        {"actor/trained_tokens": 0.0, "actor/skipped_steps": 1.0},
        {"actor/entropy": 4.0, "actor/lr": 0.3, "actor/trained_tokens": 10.0, "actor/skipped_steps": 0.0},
    ]
    expected = {"actor/entropy": 2.5, "actor/lr": 0.2, "actor/trained_tokens": 40.0, "actor/skipped_steps": 1.0}
    assert mean_metrics(updates) == pytest.approx(expected)
    assert "actor/entropy" not in mean_metrics([updates[1]])


def test_updates_of_a_step_are_put_together() -> None:
    """A metric that an update lacks, because its step was skipped, has the mean of the others."""
    updates = [
        {"actor/grad_norm": 1.0, "actor/ratio_max": 3.0, "actor/skipped_steps": 0.0},
        {"actor/ratio_max": 2.0, "actor/skipped_steps": 1.0},
        {"actor/grad_norm": 2.0, "actor/ratio_max": 1.0, "actor/skipped_steps": 1.0},
    ]
    assert mean_metrics(updates) == {"actor/grad_norm": 1.5, "actor/ratio_max": 3.0, "actor/skipped_steps": 2.0}
