"""Advantages of rewards with several parts: each is normalised within the samples of a prompt by itself, then summed.

Source: Liu et al. 2026 (GDPO, group reward-decoupled normalization policy optimization), arXiv:2601.05242, section 3.
Alignment and masks of all tensors: `mega_rl.algorithms.advantages.base`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mega_rl.algorithms.advantages.base import AdvantageInputs
from mega_rl.algorithms.advantages.prompt_groups import PromptGroups, spread
from mega_rl.algorithms.statistics import SumOverRanks, identity
from mega_rl.config.schema.algorithms import GDPOSettings
from mega_rl.types import RewardParts


@dataclass(frozen=True)
class GDPO(GDPOSettings):
    """Parts of the rewards, each normalised within the samples of one prompt; needs no critic."""

    def __call__(self, inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
        assert inputs.reward_parts is not None, "rewards without parts are refused before"
        prompts, mask = inputs.experience.prompt_index, inputs.experience.loss_mask
        advantages = gdpo(inputs.reward_parts, prompts, mask, sum_over_ranks=inputs.sum_over_ranks)
        return advantages, torch.zeros_like(advantages)


def gdpo(
    parts: RewardParts,
    group_ids: Tensor,
    mask: Tensor,
    *,
    sum_over_ranks: SumOverRanks = identity,
    eps: float = 1e-6,
) -> Tensor:
    """Advantages [B, S] float32: the same number on every response token of a row, 0 off the mask.

        s_i = sum over parts k of w_k * (r_ik - mean_k(group)) / (std_k(group) + eps)
        A_i = s_i / (std(s of the batch) + eps)      over the samples of all ranks

    parts: K parts r with their weights w; group_ids [B] int64, rows of one prompt share an id and are all on this rank;
    mask [B, S] bool. The mean of s over the batch, which the paper takes off, is 0: that of each group is. Deviations
    are the unbiased ones, as in `grpo`. A part that is equal in all samples of a prompt adds exactly 0 to them. A row
    without response tokens, a failed sample, is in no group. A part that is NaN, one that the data source of the prompt
    does not have, is in none of the row's sums, and a row without any part in no deviation of the batch.
    """
    scores = torch.zeros(len(mask), dtype=torch.float64, device=mask.device)
    present = mask.any(dim=1, keepdim=True) & ~parts.values.isnan()
    for weight, values, own in zip(parts.weights, parts.values.unbind(dim=1), present.unbind(dim=1), strict=True):
        groups, rewards = PromptGroups.of(group_ids, mask & own[:, None]), values.nan_to_num()
        centred = groups.centred(rewards)
        deviation = (groups.sum(centred.square()) / (groups.counts - 1).clamp(min=1)).sqrt()
        scores += weight * centred / (deviation + eps)
    sums = sum_over_ranks(torch.stack([present.any(dim=1).double(), scores.square()]).sum(dim=1))
    count, squares = sums.unbind()
    return spread(scores / ((squares / (count - 1).clamp(min=1)).sqrt() + eps), mask)
