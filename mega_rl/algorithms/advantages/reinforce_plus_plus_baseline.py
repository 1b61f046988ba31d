"""REINFORCE++ with a baseline: rewards relative to the mean of the prompt's samples, whitened over the global batch.

Source: Hu et al. 2025, arXiv:2501.03262. Alignment and masks of all tensors: `mega_rl.algorithms.advantages.base`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mega_rl.algorithms.advantages.base import AdvantageInputs
from mega_rl.algorithms.advantages.prompt_groups import PromptGroups
from mega_rl.algorithms.advantages.reinforce_plus_plus import reinforce_plus_plus
from mega_rl.config.schema.algorithms import ReinforcePlusPlusBaselineSettings


@dataclass(frozen=True)
class ReinforcePlusPlusBaseline(ReinforcePlusPlusBaselineSettings):
    """REINFORCE++ of rewards less the mean of the prompt's samples, without discount; needs no critic.

        score_i = r_i - mean(group)

    A group of equal rewards scores exactly 0 on each of its rows, which whitening may shift.
    """

    def __call__(self, inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
        mask = inputs.experience.loss_mask
        scores = PromptGroups.of(inputs.experience.prompt_index, mask).centred(inputs.rewards).float()
        advantages = reinforce_plus_plus(scores, mask, inputs.kl_penalty, sum_over_ranks=inputs.sum_over_ranks)
        return advantages, torch.zeros_like(advantages)
