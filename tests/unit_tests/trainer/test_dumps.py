"""Dumped samples: which ones, and what is said of each."""

from __future__ import annotations

import pytest
import torch

from mega_rl.trainer.events import group_rows, sample_rows
from mega_rl.trainer.rows import Samples
from mega_rl.types import Prompt, Rewards, Rollout, ends_of
from tests.helpers.rollouts import make_rollout

PROMPTS = [Prompt(index=10 + i, token_ids=(1, 2), text=f"p{i}", answer=str(i)) for i in range(2)]


def read_row(rollout: Rollout, row: int) -> tuple[str, str]:
    return f"row {row}", f"all of row {row}"


@pytest.mark.parametrize(
    ("count", "rows"),
    [
        (0, []),
        (1, [0, 1]),
        (2, [0, 1]),
        (4, [0, 1, 4, 5]),
        (7, [0, 1, 2, 3, 4, 5]),
        (99, [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_whole_groups_are_dumped(count: int, rows: list[int]) -> None:
    """Of four prompts with two samples each."""
    assert group_rows([5, 5, 3, 3, 7, 7, 1, 1], count) == rows


def test_a_row_says_what_became_of_a_sample() -> None:
    """Two samples of one prompt: one that ended and one that was cut off, which two versions of the weights sampled."""
    rollout = make_rollout([3, 2], prompt_tokens=2, version=4)
    rollout.end = ends_of(torch.tensor([True, False]))
    advantages = torch.tensor([[0.0, 0.0, 1.0, 2.0, 6.0], [0.0, 0.0, -1.0, 0.5, 0.0]])
    given = {"render": str, "step": 7, "count": 2}
    first, second = sample_rows(
        Samples(PROMPTS, rollout, Rewards(torch.tensor([1.0, -1.0])), torch.arange(1)),
        read_row,
        advantages=advantages,
        **given,
    )  # type: ignore[arg-type]
    assert (first["response"], first["response_tokens"], first["finished"]) == ("all of row 0", 3, True)
    assert (second["response"], second["response_tokens"], second["finished"]) == ("all of row 1", 2, False)
    assert (first["advantage_mean"], second["advantage_mean"]) == (3.0, -0.25)
    assert (first["reward"], first["weight_version"], first["step"]) == (1.0, 4, 7)
    assert "newest_weight_version" not in first
    rollout.token_versions = torch.tensor([[0, 0, 4, 5, 5], [0, 0, 4, 4, 0]])
    first, second = sample_rows(Samples(PROMPTS, rollout, Rewards(torch.zeros(2)), torch.arange(1)), read_row, **given)  # type: ignore[arg-type]
    assert (first["newest_weight_version"], second["newest_weight_version"]) == (5, 4)
    assert "advantage_mean" not in first
