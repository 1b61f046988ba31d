"""Advantage estimators, each with its settings; `ESTIMATORS` lists them.

Some compare the samples of a prompt: one number for all response tokens of a row. A row without response tokens, a
failed sample, is in no group. A group of one, or of equal rewards, gives exactly 0.

Recipes choose by `name`, as `algorithm.advantage=gae`. Config reads this file without torch, so an estimator imports
it when it is called.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from mega_rl.config.setting import Kind, by_name, setting

if TYPE_CHECKING:
    from mega_rl.algorithms.inputs import AdvantageInputs, Advantages


@dataclass(frozen=True)
class AdvantageKind(Kind):
    """An estimator: its fields are its settings, its class variables say what it needs of a run.

    Called with inputs it returns (advantages, value targets), [B, S] float32 each, 0 off the loss mask. Value targets
    are 0 without a critic.
    """

    needs_critic: ClassVar[bool] = False  # values of a critic, which then trains
    needs_groups: ClassVar[bool] = False  # several samples of each prompt
    needs_reference: ClassVar[bool] = False  # log-probs of the reference, which is built even without a KL to it
    needs_greedy: ClassVar[bool] = False  # the reward of a greedy response to each prompt
    needs_parts: ClassVar[bool] = False  # named parts of the rewards
    takes_kl: ClassVar[bool] = False  # has rewards of single tokens, which a KL penalty may enter
    needs_no_rewards: ClassVar[bool] = False  # may learn without them: reward.source=none


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
            own = groups.counted * torch.stack([torch.ones_like(centred), centred.square()])
            count, squares = inputs.sum_over_ranks(own.sum(dim=1))
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
        from mega_rl.types import over_trajectory

        lengths = over_trajectory(inputs.mask.sum(dim=1).double(), inputs.experience.branch)
        return inputs.on_responses(inputs.groups.centred(inputs.rewards, weights=lengths))


@dataclass(frozen=True)
class GDPO(AdvantageKind):
    """Named parts of the reward, each relative to the prompt's other samples, summed by reward.weights.

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
        counted, present = inputs.groups.counted, inputs.groups.answered[:, None] & ~parts.values.isnan()
        for weight, values, own in zip(parts.weights, parts.values.unbind(dim=1), present.unbind(dim=1), strict=True):
            groups, rewards = inputs.groups_where(own), values.nan_to_num()
            centred = groups.centred(rewards)
            deviation = (groups.sum(centred.square()) / (groups.counts - 1).clamp(min=1)).sqrt()
            scores += weight * centred / (deviation + self.eps)
        sums = inputs.sum_over_ranks((torch.stack([present.any(dim=1).double(), scores.square()]) * counted).sum(dim=1))
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


@dataclass(frozen=True)
class GAE(AdvantageKind):
    """Generalized advantage estimation over the values of a critic.

        A_t = delta_t + gamma * lambda * A_{t+1}      delta_t = r_t + gamma * V_{t+1} - V_t

    The policy's lambda may differ from that of the critic's targets. r_t has the environment's scores of turns. With
    discount_per="turn" gamma and lambda are 1 but for the last token of each turn. A turn that several branches share
    continues in the mean of them.
    Source: Schulman et al. 2016, arXiv:1506.02438; decoupled: Yuan et al. 2025 (VC-PPO), arXiv:2503.01491; Yue et al.
    2025 (VAPO), arXiv:2504.05118.
    """

    name = "gae"
    needs_critic = True
    takes_kl = True

    discount_per: str = setting(
        "token", "Step that gamma and lambda count: a token, or a turn of an agent.", choices=("token", "turn")
    )
    gamma: float = setting(1.0, "Discount per step.", min=0.0, max=1.0)
    gae_lambda: float = setting(
        1.0,
        "Decay of later errors per step, in the critic's targets, and in the advantages unless the next two say "
        "otherwise.",
        min=0.0,
        max=1.0,
    )
    policy_lambda: float = setting(
        0.0, "Decay for the policy's advantages, below the critic's; 0: gae_lambda.", min=0.0, max=1.0
    )
    length_alpha: float = setting(
        0.0,
        "Decay of the advantages, 1 - 1 / (length_alpha * response tokens), as in VAPO (0.05); 0: constant.",
        min=0.0,
    )
    whiten: bool = setting(True, "Whiten the advantages over the global batch.")

    def problems(self) -> Iterator[str]:
        if self.policy_lambda and self.length_alpha:
            yield f"policy_lambda={self.policy_lambda:g} has no effect together with length_alpha={self.length_alpha:g}"

        if self.length_alpha and self.discount_per == "turn":
            yield f"length_alpha={self.length_alpha:g} counts tokens; legal with discount_per=turn: 0"

    def __call__(self, inputs: AdvantageInputs) -> Advantages:
        from mega_rl.algorithms.inputs import gae, length_adaptive_lambda

        mask, values, scores = inputs.mask, inputs.experience.values, inputs.turn_rewards()
        estimate = partial(gae, gamma=self.gamma, per_turn=self.discount_per == "turn", forks=inputs.forks)
        advantages, returns = estimate(scores, values, mask, lam=self.gae_lambda)
        if self.policy_lambda or self.length_alpha:
            lam = length_adaptive_lambda(mask, alpha=self.length_alpha) if self.length_alpha else self.policy_lambda
            advantages, _ = estimate(scores, values, mask, lam=lam)
        if self.whiten:
            advantages = inputs.whitened(advantages)
        return advantages, returns


@dataclass(frozen=True)
class ReMax(AdvantageKind):
    """Returns relative to the reward of the prompt's greedy response.

        r_t = r * [t is the last response token] - kl_penalty_t
        A_t = sum of r_s over s >= t, minus the reward of the greedy response to the prompt

    The baseline does not depend on the sample, so the gradient has no bias. A row whose prompt has no greedy reward
    (NaN, since that sample failed) gives 0.
    Source: Li et al. 2023, arXiv:2310.10505, section 4.
    """

    name = "remax"
    needs_greedy = True
    takes_kl = True

    def __call__(self, inputs: AdvantageInputs) -> Advantages:
        import torch

        greedy = inputs.greedy_rewards
        assert greedy is not None, "greedy responses are sampled for an estimator that needs them"
        returns = inputs.returns(inputs.token_rewards(inputs.rewards), gamma=1.0)
        known = inputs.mask & ~greedy.isnan()[:, None]
        return inputs.on_tokens(torch.where(known, returns - greedy[:, None], 0.0))


@dataclass(frozen=True)
class ReinforcePlusPlus(AdvantageKind):
    """Returns of token rewards without a critic, whitened over the global batch.

        r_t = score * [t is the last response token] - kl_penalty_t
        G_t = r_t + gamma * G_{t+1}
        A_t = (G_t - mean(G)) / std(G)      over the tokens of all ranks

    Source: Hu et al. 2025, arXiv:2501.03262.
    """

    name = "reinforce_plus_plus"
    takes_kl = True

    gamma: float = setting(1.0, "Discount per token.", min=0.0, max=1.0)

    def __call__(self, inputs: AdvantageInputs) -> Advantages:
        returns = inputs.returns(inputs.turn_rewards(), gamma=self.gamma)
        return inputs.on_tokens(inputs.whitened(returns))


@dataclass(frozen=True)
class ReinforcePlusPlusBaseline(AdvantageKind):
    """REINFORCE++ of rewards relative to the mean of the prompt's samples.

        score_i = r_i - mean(group)      without discount

    A group of equal rewards scores exactly 0 on each of its rows, which whitening may shift.
    Source: Hu et al. 2025, arXiv:2501.03262.
    """

    name = "reinforce_plus_plus_baseline"
    needs_groups = True
    takes_kl = True

    def __call__(self, inputs: AdvantageInputs) -> Advantages:
        scores = inputs.groups.centred(inputs.rewards).float()
        returns = inputs.returns(inputs.token_rewards(scores), gamma=1.0)
        return inputs.on_tokens(inputs.whitened(returns))


@dataclass(frozen=True)
class Distillation(AdvantageKind):
    """On-policy distillation: log ratios of a teacher, the model of model.ref_path, to the student.

        A_t = sum over k >= t of gamma^(k - t) * (log q(y_k) - log p(y_k))

    p is the student, q the teacher; k counts the response tokens of the row. With gamma 1 the mean of
    A_t grad log p(y_t) is the descent of KL(p || q) over whole responses; with gamma 0 that of the KL at the sampled
    prefixes, of far smaller variance.
    Source: Agarwal et al. 2023 (GKD), arXiv:2306.13649, on-policy with the reverse KL; Lu et al. 2025, "On-Policy
    Distillation" (Thinking Machines Lab), whose per-token form discounts by 0.
    """

    name = "distillation"
    needs_reference = True
    needs_no_rewards = True

    gamma: float = setting(
        0.0, "Discount per token of later tokens' log ratios; 0: every token answers for itself.", min=0.0, max=1.0
    )
    reward_weight: float = setting(
        0.0, "Weight of the reward that is added, less the mean of the prompt's other samples.", min=0.0
    )

    def __call__(self, inputs: AdvantageInputs) -> Advantages:
        import torch

        student, teacher = inputs.experience.old_logprobs, inputs.experience.ref_logprobs
        gaps = torch.where(inputs.mask, teacher.float() - student.float(), 0.0)
        advantages = inputs.returns(gaps, gamma=self.gamma)
        if self.reward_weight:
            advantages = advantages + self.reward_weight * RLOO()(inputs)[0]
        return inputs.on_tokens(advantages)


ESTIMATORS = by_name(
    GRPO, RLOO, OPO, GDPO, PassAtK, GAE, ReMax, ReinforcePlusPlus, ReinforcePlusPlusBaseline, Distillation
)
