"""Leave-one-out advantages: each sample against the mean of the other samples of its prompt.

Source: Ahmadian et al. 2024 (RLOO), arXiv:2402.14740; Kool et al. 2019, "Buy 4 REINFORCE samples, get a
baseline for free!". Alignment and masks of all tensors: `mega_rl.algorithms.advantages.base`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mega_rl.algorithms.advantages.base import AdvantageInputs
from mega_rl.algorithms.advantages.prompt_groups import PromptGroups, spread
from mega_rl.config.schema.algorithms import RLOOSettings


@dataclass(frozen=True)
class RLOO(RLOOSettings):
    """Rewards less the mean of the prompt's other samples; needs no critic."""

    def __call__(self, inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
        advantages = rloo(inputs.rewards, inputs.experience.prompt_index, inputs.experience.loss_mask)
        return advantages, torch.zeros_like(advantages)


def rloo(rewards: Tensor, group_ids: Tensor, mask: Tensor) -> Tensor:
    """Leave-one-out advantages [B, S] float32: the same number on every response token of a row, 0 off the mask.

        A_i = r_i - mean(r_j of the group, j != i) = n / (n - 1) * (r_i - mean(group))

    rewards [B] float32; group_ids [B] int64, rows of one prompt share an id and are all on this rank; mask [B, S] bool;
    n the group's rows with a response. The baseline does not depend on the sample, so the mean of A_i grad log p_i is
    an unbiased policy gradient. A group of one, or of equal rewards, gives exactly 0.
    """
    groups = PromptGroups.of(group_ids, mask)
    n = groups.counts
    return spread(groups.centred(rewards) * n / (n - 1).clamp(min=1), mask)
