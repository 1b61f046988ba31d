"""Advantages that compare the samples of a prompt. Alignment and masks of all tensors: `advantages.base`.

Each function returns advantages [B, S] float32: the same number on every response token of a row, 0 off the mask. Its
`rewards` are [B] float32, `group_ids` [B] int64 (rows of one prompt share an id and are all on this rank), `mask` is
[B, S] bool. A row without response tokens, a failed sample, is in no group. A group of one, or of equal rewards, gives
exactly 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mega_rl.algorithms.advantages.base import AdvantageInputs, without_values
from mega_rl.algorithms.statistics import SumOverRanks, identity
from mega_rl.config.schema import algorithms as settings
from mega_rl.types import RewardParts


@dataclass(frozen=True)
class PromptGroups:
    """Rows by prompt. A row without response tokens, a failed sample, is in no group and in no sum."""

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
        """Return [B] float64, the sum of x [B] over the answered rows of each row's group."""
        totals = torch.zeros(self.num_groups, dtype=torch.float64, device=x.device)
        return totals.index_add(0, self.index, torch.where(self.answered, x.double(), 0.0))[self.index]

    @property
    def counts(self) -> Tensor:
        """Return [B] float64, the number of answered rows in each row's group, at least 1 to divide by."""
        return self.sum(self.answered).clamp(min=1)

    def centred(self, rewards: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return [B] float64, each row's reward minus the mean of its group; 0 for a row that is in no group.

        rewards [B] float32; weights [B] of the mean, integers above 0; None: equal ones. A group whose rewards are all
        equal, hence also a group of one, gives exactly 0, which no later division can blow up: float64 holds sums of
        equal float32 numbers without rounding while the group's weights sum to less than 2^29.
        """
        rewards, weights = rewards.double(), torch.ones_like(rewards) if weights is None else weights
        mean = self.sum(weights * rewards) / self.sum(weights)
        return torch.where(self.answered, rewards - mean, 0.0)


def spread(advantages: Tensor, mask: Tensor) -> Tensor:
    """Return [B, S] float32, each row's number [B] on all of its response tokens, 0 off the mask [B, S] bool."""
    return torch.where(mask, advantages.float()[:, None], 0.0)


@dataclass(frozen=True)
class GRPO(settings.GRPOSettings):
    """Rewards normalised within the samples of one prompt, as `grpo`; needs no critic."""

    def __call__(self, inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
        prompts, mask = inputs.experience.prompt_index, inputs.experience.loss_mask
        return without_values(grpo(inputs.rewards, prompts, mask, std=self.std, sum_over_ranks=inputs.sum_over_ranks))


def grpo(
    rewards: Tensor,
    group_ids: Tensor,
    mask: Tensor,
    *,
    std: str = "group",
    sum_over_ranks: SumOverRanks = identity,
    eps: float = 1e-6,
) -> Tensor:
    """Return group-relative advantages.

        c_i = r_i - mean(group)
        A_i = c_i / (std(r of the group) + eps)     std="group"
        A_i = c_i / (std(c of the batch) + eps)     std="batch", over the samples of all ranks
        A_i = c_i                                   std="none" (Dr. GRPO)

    The standard deviation is the unbiased one (divided by n - 1), as in the implementations that published results
    come from; the population's would scale every advantage by sqrt(n / (n - 1)).
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


@dataclass(frozen=True)
class RLOO(settings.RLOOSettings):
    """Rewards less the mean of the prompt's other samples, as `rloo`; needs no critic."""

    def __call__(self, inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
        return without_values(rloo(inputs.rewards, inputs.experience.prompt_index, inputs.experience.loss_mask))


def rloo(rewards: Tensor, group_ids: Tensor, mask: Tensor) -> Tensor:
    """Return leave-one-out advantages: each sample against the mean of the other samples of its prompt.

        A_i = r_i - mean(r_j of the group, j != i) = n / (n - 1) * (r_i - mean(group))

    n is the number of the group's rows with a response. The baseline does not depend on the sample, so the mean of
    A_i grad log p_i is an unbiased policy gradient.
    Source: Ahmadian et al. 2024 (RLOO), arXiv:2402.14740; Kool et al. 2019, "Buy 4 REINFORCE samples, get a
    baseline for free!".
    """
    groups = PromptGroups.of(group_ids, mask)
    n = groups.counts
    return spread(groups.centred(rewards) * n / (n - 1).clamp(min=1), mask)


@dataclass(frozen=True)
class OPO(settings.OPOSettings):
    """Rewards less the prompt's mean reward weighted by length, as `opo`; needs no critic."""

    def __call__(self, inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
        return without_values(opo(inputs.rewards, inputs.experience.prompt_index, inputs.experience.loss_mask))


def opo(rewards: Tensor, group_ids: Tensor, mask: Tensor) -> Tensor:
    """Return advantages with the optimal baseline of a prompt, the mean reward weighted by length.

        A_i = r_i - sum(l_j * r_j) / sum(l_j)      over the group's samples j, l_j response tokens of a sample

    A constant baseline makes the variance of the policy gradient smallest when it weighs rewards by the squared norm
    of grad log p; for tokens whose gradients are orthogonal and of equal norm that is the length. As in GRPO the
    baseline holds the sample itself, which makes the gradient smaller: by (n - 1) / n if all lengths are equal.
    Source: Hao et al. 2025 (OPO), arXiv:2505.23585.
    """
    lengths = mask.sum(dim=1).double()
    return spread(PromptGroups.of(group_ids, mask).centred(rewards, weights=lengths), mask)


@dataclass(frozen=True)
class GDPO(settings.GDPOSettings):
    """Parts of the rewards, each normalised within the samples of one prompt, as `gdpo`; needs no critic."""

    def __call__(self, inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
        assert inputs.reward_parts is not None, "rewards without parts are refused before"
        prompts, mask = inputs.experience.prompt_index, inputs.experience.loss_mask
        return without_values(gdpo(inputs.reward_parts, prompts, mask, sum_over_ranks=inputs.sum_over_ranks))


def gdpo(
    parts: RewardParts,
    group_ids: Tensor,
    mask: Tensor,
    *,
    sum_over_ranks: SumOverRanks = identity,
    eps: float = 1e-6,
) -> Tensor:
    """Return advantages of rewards with several parts: each is normalised within the prompt's samples, then summed.

        s_i = sum over parts k of w_k * (r_ik - mean_k(group)) / (std_k(group) + eps)
        A_i = s_i / (std(s of the batch) + eps)      over the samples of all ranks

    parts: K parts r with their weights w. The mean of s over the batch, which the paper takes off, is 0: that of each
    group is. Deviations are the unbiased ones, as in `grpo`. A part that is equal in all samples of a prompt adds
    exactly 0 to them. A part that is NaN, because the data source of the prompt does not have it, is in none of the
    row's sums, and a row without any part in no deviation of the batch.
    Source: Liu et al. 2026 (GDPO, group reward-decoupled normalization policy optimization), arXiv:2601.05242,
    section 3.
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


@dataclass(frozen=True)
class PassAtK(settings.PassAtKSettings):
    """Rewards of sets of k samples of a prompt, as `pass_at_k`; needs no critic."""

    def __call__(self, inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
        prompts, mask, normalize = inputs.experience.prompt_index, inputs.experience.loss_mask, self.std == "group"
        return without_values(
            pass_at_k(inputs.rewards, prompts, mask, k=self.k, right_above=self.right_above, normalize=normalize)
        )


def pass_at_k(
    rewards: Tensor, group_ids: Tensor, mask: Tensor, *, k: int, right_above: float = 0.5, normalize: bool = True
) -> Tensor:
    """Return advantages for pass@k: a set of k samples of a prompt is rewarded when one of them is right.

        R     = 1 - C(w, k) / C(n, k)                        mean reward of the sets of k of the group's n samples
        R_i   = 1                                            mean reward of the sets with i, where i is right
        R_i   = 1 - C(w - 1, k - 1) / C(n - 1, k - 1)        the same where i is wrong
        A_i   = (R_i - R) / sqrt(R * (1 - R))                normalize; else R_i - R

    Rewards above `right_above` are right; w are the wrong ones of a group. Without `normalize` the mean of
    A_i grad log p_i is (n - k) / (n * k) of the gradient of pass@k. A group of too few wrong samples for a set (w < k)
    or without a right one gives exactly 0. With k = 1 these are GRPO's advantages of right and wrong, by the
    population's deviation.
    Source: Chen et al. 2025 (Pass@k Training), arXiv:2508.10751, the form by analytical derivation.
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
