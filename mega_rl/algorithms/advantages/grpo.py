"""Group-relative advantages: rewards normalised within the samples of one prompt (Shao et al. 2024, arXiv:2402.03300).

Alignment and masks of all tensors: `mega_rl.algorithms.advantages.base`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mega_rl.algorithms.advantages.base import AdvantageInputs
from mega_rl.algorithms.advantages.prompt_groups import PromptGroups, spread
from mega_rl.algorithms.statistics import SumOverRanks, identity
from mega_rl.config.schema.algorithms import GRPOSettings


@dataclass(frozen=True)
class GRPO(GRPOSettings):
    """Rewards normalised within the samples of one prompt; needs no critic."""

    def __call__(self, inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
        prompts, mask = inputs.experience.prompt_index, inputs.experience.loss_mask
        advantages = grpo(inputs.rewards, prompts, mask, std=self.std, sum_over_ranks=inputs.sum_over_ranks)
        return advantages, torch.zeros_like(advantages)


def grpo(
    rewards: Tensor,
    group_ids: Tensor,
    mask: Tensor,
    *,
    std: str = "group",
    sum_over_ranks: SumOverRanks = identity,
    eps: float = 1e-6,
) -> Tensor:
    """Group-relative advantages [B, S] float32: the same number on every response token of a row, 0 off the mask.

        c_i = r_i - mean(group)
        A_i = c_i / (std(r of the group) + eps)     std="group"
        A_i = c_i / (std(c of the batch) + eps)     std="batch", over the samples of all ranks
        A_i = c_i                                   std="none" (Dr. GRPO)

    rewards [B] float32; group_ids [B] int64, rows of one prompt share an id and are all on this rank; mask [B, S] bool.
    The standard deviation is the unbiased one (divided by n - 1), as in the implementations that published results
    come from; the population's would scale every advantage by sqrt(n / (n - 1)). A group whose rewards are all equal,
    hence also a group of one, gives exactly 0. A row without response tokens, a failed sample, is in no group.
    Source: Shao et al. 2024 (DeepSeekMath), arXiv:2402.03300, section 4.1.2; Liu et al. 2025 (Dr. GRPO),
    arXiv:2503.20783, section 3.2. "batch" is after Liu et al. 2025 (Lite PPO), arXiv:2508.08221, with the deviation of
    centred rewards: that of the rewards themselves would grow with the difference between easy and hard prompts.
    """
    groups = PromptGroups.of(group_ids, mask)
    centred = groups.centred(rewards)
    if std == "none":
        return spread(centred, mask)
    count, squares = groups.counts, groups.sum(centred.square())
    if std == "batch":
        count, squares = sum_over_ranks(torch.stack([groups.answered.double(), centred.square()]).sum(dim=1))
    return spread(centred / ((squares / (count - 1).clamp(min=1)).sqrt() + eps), mask)
