"""Advantages with the optimal baseline of a prompt, the mean reward weighted by length.

Source: Hao et al. 2025 (OPO), arXiv:2505.23585. Alignment and masks of all tensors:
`mega_rl.algorithms.advantages.base`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mega_rl.algorithms.advantages.base import AdvantageInputs
from mega_rl.algorithms.advantages.prompt_groups import PromptGroups, spread
from mega_rl.config.schema.algorithms import OPOSettings


@dataclass(frozen=True)
class OPO(OPOSettings):
    """Rewards less the prompt's mean reward weighted by length; needs no critic."""

    def __call__(self, inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
        advantages = opo(inputs.rewards, inputs.experience.prompt_index, inputs.experience.loss_mask)
        return advantages, torch.zeros_like(advantages)


def opo(rewards: Tensor, group_ids: Tensor, mask: Tensor) -> Tensor:
    """Advantages [B, S] float32: the same number on every response token of a row, 0 off the mask.

        A_i = r_i - sum(l_j * r_j) / sum(l_j)      over the group's samples j, l_j response tokens of a sample

    rewards [B] float32; group_ids [B] int64, rows of one prompt share an id and are all on this rank; mask [B, S] bool.
    A constant baseline makes the variance of the policy gradient smallest when it weighs rewards by the squared norm
    of grad log p; for tokens whose gradients are orthogonal and of equal norm that is the length. As in GRPO the
    baseline holds the sample itself, which makes the gradient smaller: by (n - 1) / n where all lengths are equal.
    A group of one, or of equal rewards, gives exactly 0.
    """
    lengths = mask.sum(dim=1).double()
    return spread(PromptGroups.of(group_ids, mask).centred(rewards, weights=lengths), mask)
