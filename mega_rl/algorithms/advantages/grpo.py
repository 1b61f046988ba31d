"""Group-relative advantages: rewards normalised within the samples of one prompt (Shao et al. 2024, arXiv:2402.03300).

Alignment and masks of all tensors: `mega_rl.algorithms.advantages.base`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mega_rl.algorithms.advantages.base import AdvantageInputs
from mega_rl.config.schema.algorithms import GRPOSettings


@dataclass(frozen=True)
class GRPO(GRPOSettings):
    """Rewards normalised within the samples of one prompt; needs no critic."""

    def __call__(self, inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
        experience = inputs.experience
        advantages = grpo(
            inputs.rewards,
            experience.prompt_index,
            experience.loss_mask,
            std_normalization=self.std == "group",
        )
        return advantages, torch.zeros_like(advantages)


def grpo(
    rewards: Tensor, group_ids: Tensor, mask: Tensor, *, std_normalization: bool = True, eps: float = 1e-6
) -> Tensor:
    """Group-relative advantages [B, S] float32: the same number on every response token of a row, 0 off the mask.

        A_i = (r_i - mean(group)) / (std(group) + eps)      std_normalization
        A_i =  r_i - mean(group)                            otherwise (Dr. GRPO)

    rewards [B] float32; group_ids [B] int64, rows of one prompt share an id and are all on this rank; mask [B, S] bool.
    The standard deviation is the unbiased one (divided by n - 1), as in the implementations that published results
    come from; the population's would scale every advantage by sqrt(n / (n - 1)). A group whose rewards are all equal,
    hence also a group of one, gives exactly 0: rounding of the mean must not be blown up by a division by eps. A row
    without response tokens, as a failed sample has none, is in no group: it changes neither mean, deviation nor n.
    Source: Shao et al. 2024 (DeepSeekMath), arXiv:2402.03300, section 4.1.2; Liu et al. 2025 (Dr. GRPO),
    arXiv:2503.20783, section 3.2.
    """
    ids, group = torch.unique(group_ids, return_inverse=True)
    answered = mask.any(dim=1)
    scores = torch.where(answered, rewards.double(), 0.0)

    def group_sum(x: Tensor) -> Tensor:
        return torch.zeros(ids.shape, dtype=torch.float64, device=x.device).index_add(0, group, x)

    def group_extreme(how: str, *, absent: float) -> Tensor:
        out = torch.zeros(ids.shape, dtype=torch.float64, device=scores.device)
        present = torch.where(answered, scores, absent)
        return out.scatter_reduce(0, group, present, reduce=how, include_self=False)

    counts = group_sum(answered.double())
    centred = torch.where(answered, scores - (group_sum(scores) / counts.clamp(min=1))[group], 0.0)
    if std_normalization:
        variance = group_sum(centred.square()) / (counts - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + eps)[group]
    constant = (group_extreme("amax", absent=-torch.inf) == group_extreme("amin", absent=torch.inf))[group]
    advantages = torch.where(constant, 0.0, centred).to(torch.float32)
    return torch.where(mask, advantages[:, None], 0.0)
