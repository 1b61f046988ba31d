"""Sums over the samples of a prompt, written once for the estimators that compare samples.

Alignment and masks of all tensors: `mega_rl.algorithms.advantages.base`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PromptGroups:
    """Rows by prompt. A row without response tokens, as a failed sample has none, is in no group and in no sum."""

    index: Tensor  # [B] int64, number of the row's group: 0 .. num_groups-1
    num_groups: int
    answered: Tensor  # [B] bool, rows with a response token

    @classmethod
    def of(cls, group_ids: Tensor, mask: Tensor) -> PromptGroups:
        """Return the groups of rows with equal `group_ids` [B] int64; mask [B, S] bool.

        All samples of a prompt are on this rank: the rollout role shares prompts over data-parallel ranks, not samples.
        """
        ids, index = torch.unique(group_ids, return_inverse=True)
        return cls(index=index, num_groups=len(ids), answered=mask.any(dim=1))

    def sum(self, x: Tensor) -> Tensor:
        """[B] float64, the sum of x [B] over each row's group; of the group's answered rows alone."""
        totals = torch.zeros(self.num_groups, dtype=torch.float64, device=x.device)
        return totals.index_add(0, self.index, torch.where(self.answered, x.double(), 0.0))[self.index]

    @property
    def counts(self) -> Tensor:
        """[B] float64, the number of answered rows in each row's group, at least 1 to divide by."""
        return self.sum(self.answered).clamp(min=1)

    def centred(self, rewards: Tensor, weights: Tensor | None = None) -> Tensor:
        """[B] float64, each row's reward minus the mean of its group; 0 for a row that is in none.

        rewards [B] float32; weights [B] of the mean, integers above 0; None: equal ones. A group whose rewards are all
        equal, hence also a group of one, gives exactly 0, which no later division can blow up: float64 holds sums of
        equal float32 numbers without rounding, as far as the group's weights sum to less than 2^29.
        """
        rewards, weights = rewards.double(), torch.ones_like(rewards) if weights is None else weights
        mean = self.sum(weights * rewards) / self.sum(weights)
        return torch.where(self.answered, rewards - mean, 0.0)


def spread(advantages: Tensor, mask: Tensor) -> Tensor:
    """[B, S] float32, each row's number [B] on all of its response tokens, 0 off the mask [B, S] bool."""
    return torch.where(mask, advantages.float()[:, None], 0.0)
