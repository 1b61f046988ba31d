"""Advantages that compare the samples of a prompt: one number for all response tokens of a row.

A row without response tokens, a failed sample, is in no group. A group of one, or of equal rewards, gives exactly 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mega_rl.algorithms.advantages import AdvantageKind
from mega_rl.config.setting import setting

if TYPE_CHECKING:
    from mega_rl.algorithms.inputs import AdvantageInputs, Advantages


@dataclass(frozen=True)
class GRPO(AdvantageKind):
    """Rewards relative to the other samples of the prompt.

        c_i = r_i - mean(group)
        A_i = c_i / (std(r of the group) + eps)     std="group"
        A_i = c_i / (std(c of the batch) + eps)     std="batch", over the samples of all ranks
        A_i = c_i                                   std="none" (Dr. GRPO)

    The standard deviation is the unbiased one (divided by n - 1).
    Source: Shao et al. 2024 (DeepSeekMath), arXiv:2402.03300, section 4.1.2; Liu et al. 2025 (Dr. GRPO),
    arXiv:2503.20783, section 3.2; "batch": Liu et al. 2025 (Lite PPO), arXiv:2508.08221, here of centred rewards.
    """

    name = "grpo"
    needs_groups = True
    eps: ClassVar[float] = 1e-6

    std: str = setting(
        "group",
        "Deviation that divides centred rewards: of the prompt's samples, of all, or none as in Dr. GRPO.",
        choices=("group", "batch", "none"),
    )

    def __call__(self, inputs: AdvantageInputs) -> Advantages:
        import torch

        groups = inputs.groups
        centred = groups.centred(inputs.rewards)
        if self.std == "none":
            return inputs.on_responses(centred)
        count, squares = groups.counts, groups.sum(centred.square())
        if self.std == "batch":
            count, squares = inputs.sum_over_ranks(torch.stack([groups.answered.double(), centred.square()]).sum(dim=1))
        return inputs.on_responses(centred / ((squares / (count - 1).clamp(min=1)).sqrt() + self.eps))


@dataclass(frozen=True)
class RLOO(AdvantageKind):
    """Rewards relative to the mean of the prompt's other samples.

        A_i = r_i - mean(r_j of the group, j != i) = n / (n - 1) * (r_i - mean(group))

    n is the number of the group's rows with a response. The baseline does not depend on the sample, so the mean of
    A_i grad log p_i is an unbiased policy gradient.
    Source: Ahmadian et al. 2024 (RLOO), arXiv:2402.14740; Kool et al. 2019, "Buy 4 REINFORCE samples, get a
    baseline for free!".
    """

    name = "rloo"
    needs_groups = True

    def __call__(self, inputs: AdvantageInputs) -> Advantages:
        groups = inputs.groups
        n = groups.counts
        return inputs.on_responses(groups.centred(inputs.rewards) * n / (n - 1).clamp(min=1))


@dataclass(frozen=True)
class OPO(AdvantageKind):
    """Rewards relative to the prompt's mean reward per token.

        A_i = r_i - sum(l_j * r_j) / sum(l_j)      over the group's samples j, l_j response tokens of a sample

    The baseline of smallest variance if tokens' gradients are orthogonal and of equal norm. It holds the sample itself,
    which makes the gradient smaller: by (n - 1) / n if all lengths are equal.
    Source: Hao et al. 2025 (OPO), arXiv:2505.23585.
    """

    name = "opo"
    needs_groups = True

    def __call__(self, inputs: AdvantageInputs) -> Advantages:
        lengths = inputs.mask.sum(dim=1).double()
        return inputs.on_responses(inputs.groups.centred(inputs.rewards, weights=lengths))


@dataclass(frozen=True)
class GDPO(AdvantageKind):
    """Named parts of the rewards, each relative to the other samples of the prompt, summed by reward.weights.

        s_i = sum over parts k of w_k * (r_ik - mean_k(group)) / (std_k(group) + eps)
        A_i = s_i / (std(s of the batch) + eps)      over the samples of all ranks

    Deviations are the unbiased ones. A part that is equal in all samples of a prompt adds exactly 0. A part that is
    NaN, because the data source of the prompt does not have it, is in none of the row's sums, and a row without any
    part in no deviation of the batch.
    Source: Liu et al. 2026 (GDPO, group reward-decoupled normalization policy optimization), arXiv:2601.05242,
    section 3.
    """

    name = "gdpo"
    needs_groups = True
    needs_parts = True
    eps: ClassVar[float] = 1e-6

    def __call__(self, inputs: AdvantageInputs) -> Advantages:
        import torch

        parts, mask = inputs.reward_parts, inputs.mask
        assert parts is not None, "rewards without parts are refused before"
        scores = torch.zeros(len(mask), dtype=torch.float64, device=mask.device)
        present = mask.any(dim=1, keepdim=True) & ~parts.values.isnan()
        for weight, values, own in zip(parts.weights, parts.values.unbind(dim=1), present.unbind(dim=1), strict=True):
            groups, rewards = inputs.groups_where(own), values.nan_to_num()
            centred = groups.centred(rewards)
            deviation = (groups.sum(centred.square()) / (groups.counts - 1).clamp(min=1)).sqrt()
            scores += weight * centred / (deviation + self.eps)
        sums = inputs.sum_over_ranks(torch.stack([present.any(dim=1).double(), scores.square()]).sum(dim=1))
        count, squares = sums.unbind()
        return inputs.on_responses(scores / ((squares / (count - 1).clamp(min=1)).sqrt() + self.eps))


@dataclass(frozen=True)
class PassAtK(AdvantageKind):
    """Rewards of sets of k samples of a prompt, of which one has to be right.

        R     = 1 - C(w, k) / C(n, k)                        mean reward of the sets of k of the group's n samples
        R_i   = 1                                            mean reward of the sets with i, where i is right
        R_i   = 1 - C(w - 1, k - 1) / C(n - 1, k - 1)        the same where i is wrong
        A_i   = (R_i - R) / sqrt(R * (1 - R))                std="group"; else R_i - R

    Rewards above `right_above` are right; w are the wrong ones of a group. With std="none" the mean of
    A_i grad log p_i is (n - k) / (n * k) of the gradient of pass@k. A group of too few wrong samples for a set (w < k)
    or without a right one gives exactly 0.
    Source: Chen et al. 2025 (Pass@k Training), arXiv:2508.10751, the form by analytical derivation.
    """

    name = "pass_at_k"
    needs_groups = True

    k: int = setting(4, "Samples of a set, fewer than rollout.n.", min=1)
    right_above: float = setting(0.5, "A sample with a reward above this is right.")
    std: str = setting(
        "group",
        "Deviation that divides advantages: of the rewards of the prompt's sets (group), or none.",
        choices=("group", "none"),
    )

    def __call__(self, inputs: AdvantageInputs) -> Advantages:
        import torch

        groups = inputs.groups
        right = (inputs.rewards > self.right_above) & groups.answered
        n = groups.counts
        wrong = n - groups.sum(right)
        missed = torch.ones_like(n)  # C(w - 1, k - 1) / C(n - 1, k - 1), the share of a wrong sample's sets that miss
        for j in range(1, self.k):
            missed = missed * ((wrong - j) / (n - j).clamp(min=1)).clamp(min=0)
        all_missed = missed * wrong / n  # C(w, k) / C(n, k) = 1 - R
        advantages = torch.where(right, all_missed, all_missed - missed)
        deviation = (all_missed * (1 - all_missed)).sqrt() if self.std == "group" else torch.ones_like(n)
        return inputs.on_responses(torch.where((wrong < n) & (all_missed > 0), advantages / deviation, 0.0))
