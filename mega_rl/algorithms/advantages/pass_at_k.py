"""Advantages for pass@k: a set of k samples of a prompt is rewarded when one of them is right.

Source: Chen et al. 2025 (Pass@k Training), arXiv:2508.10751, the form by analytical derivation. Alignment and masks of
all tensors: `mega_rl.algorithms.advantages.base`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mega_rl.algorithms.advantages.base import AdvantageInputs
from mega_rl.algorithms.advantages.prompt_groups import PromptGroups, spread
from mega_rl.config.schema.algorithms import PassAtKSettings


@dataclass(frozen=True)
class PassAtK(PassAtKSettings):
    """Rewards of sets of k samples of a prompt; needs no critic."""

    def __call__(self, inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
        prompts, mask = inputs.experience.prompt_index, inputs.experience.loss_mask
        normalize = self.std == "group"
        advantages = pass_at_k(
            inputs.rewards, prompts, mask, k=self.k, right_above=self.right_above, normalize=normalize
        )
        return advantages, torch.zeros_like(advantages)


def pass_at_k(
    rewards: Tensor, group_ids: Tensor, mask: Tensor, *, k: int, right_above: float = 0.5, normalize: bool = True
) -> Tensor:
    """Pass@k advantages [B, S] float32: the same number on every response token of a row, 0 off the mask.

        R     = 1 - C(w, k) / C(n, k)                        mean reward of the sets of k of the group's n samples
        R_i   = 1                                            mean reward of the sets with i, where i is right
        R_i   = 1 - C(w - 1, k - 1) / C(n - 1, k - 1)        the same where i is wrong
        A_i   = (R_i - R) / sqrt(R * (1 - R))                normalize; else R_i - R

    rewards [B] float32, right above `right_above`; w the wrong ones of a group; group_ids [B] int64, rows of one prompt
    share an id and are all on this rank; mask [B, S] bool. Without `normalize` the mean of A_i grad log p_i is
    (n - k) / (n * k) of the gradient of pass@k. A group of too few wrong samples for a set (w < k) or of no right one
    gives exactly 0. With k = 1 these are GRPO's advantages of right and wrong, by the population's deviation.
    """
    groups = PromptGroups.of(group_ids, mask)
    right = (rewards > right_above) & groups.answered
    n = groups.counts
    wrong = n - groups.sum(right)
    missed = torch.ones_like(n)  # C(w - 1, k - 1) / C(n - 1, k - 1), the share of a wrong sample's sets that miss
    for j in range(1, k):
        missed = missed * ((wrong - j) / (n - j).clamp(min=1)).clamp(min=0)
    all_missed = missed * wrong / n  # C(w, k) / C(n, k) = 1 - R
    advantages = torch.where(right, all_missed, all_missed - missed)
    deviation = (all_missed * (1 - all_missed)).sqrt() if normalize else torch.ones_like(n)
    return spread(torch.where((wrong < n) & (all_missed > 0), advantages / deviation, 0.0), mask)
