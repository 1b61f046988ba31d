"""Distillation advantages against a loop over Python numbers, and what a recipe may make of them."""

from __future__ import annotations

import pytest
import torch

from mega_rl.algorithms.advantages import RLOO, Distillation
from tests.helpers.advantages import advantages_of

G = torch.Generator().manual_seed(3)
ROWS, WIDTH = 6, 9
MASK = torch.rand(ROWS, WIDTH, generator=G) < 0.6  # several turns in a row
MASK[4] = False  # a failed sample
STUDENT, TEACHER = (-3 * torch.rand(ROWS, WIDTH, generator=G) for _ in range(2))
REWARDS = torch.rand(ROWS, generator=G)
PROMPTS = torch.tensor([0, 0, 0, 1, 1, 1])


def by_hand(gamma: float) -> torch.Tensor:
    """A_t as a sum over the response tokens from t on, in Python's float64."""
    out = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    for row in range(ROWS):
        places = MASK[row].nonzero().flatten().tolist()
        gaps = [float(TEACHER[row, place]) - float(STUDENT[row, place]) for place in places]
        for t, place in enumerate(places):
            out[row, place] = sum(gamma ** (k - t) * gaps[k] for k in range(t, len(gaps)))
    return out


def estimated(rewards: torch.Tensor, **settings: float) -> torch.Tensor:
    """Log-probs off the mask are never read."""
    old, ref = (torch.where(MASK, logprobs, torch.nan) for logprobs in (STUDENT, TEACHER))
    return advantages_of(Distillation(**settings), rewards, PROMPTS, MASK, old_logprobs=old, ref_logprobs=ref)


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
def test_it_is_the_discounted_sum_of_log_ratios(gamma: float) -> None:
    """Sums of at most nine numbers below 3 in float32: 1e-6 of each. Rewards are not read."""
    actual = estimated(torch.full((ROWS,), torch.nan), gamma=gamma)
    torch.testing.assert_close(actual.double(), by_hand(gamma), rtol=1e-6, atol=3e-6)
    assert not actual[~MASK].any()


def test_a_reward_is_added_with_its_weight() -> None:
    expected = torch.where(MASK, TEACHER - STUDENT, 0.0) + 0.5 * advantages_of(RLOO(), REWARDS, PROMPTS, MASK)
    torch.testing.assert_close(estimated(REWARDS, reward_weight=0.5), expected, rtol=0, atol=0)
