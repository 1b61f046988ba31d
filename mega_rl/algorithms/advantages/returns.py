"""Advantages that are returns of token rewards, or sums of a teacher's log ratios."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mega_rl.algorithms.advantages import AdvantageKind
from mega_rl.algorithms.advantages.groups import RLOO
from mega_rl.config.setting import setting

if TYPE_CHECKING:
    from mega_rl.algorithms.inputs import AdvantageInputs, Advantages


@dataclass(frozen=True)
class GAE(AdvantageKind):
    """Generalized advantage estimation over the values of a critic.

        A_t = delta_t + gamma * lambda * A_{t+1}      delta_t = r_t + gamma * V_{t+1} - V_t

    The policy's lambda may differ from that of the critic's targets.
    Source: Schulman et al. 2016, arXiv:1506.02438; decoupled: Yuan et al. 2025 (VC-PPO), arXiv:2503.01491; Yue et al.
    2025 (VAPO), arXiv:2504.05118.
    """

    name = "gae"
    needs_critic = True
    takes_kl = True

    gamma: float = setting(1.0, "Discount per token.", min=0.0, max=1.0)
    gae_lambda: float = setting(
        1.0,
        "Decay of later errors per token, in the critic's targets, and in the advantages unless the next two say "
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
            yield f"policy_lambda={self.policy_lambda:g} has no effect beside length_alpha={self.length_alpha:g}"

    def __call__(self, inputs: AdvantageInputs) -> Advantages:
        from mega_rl.algorithms.inputs import gae, length_adaptive_lambda

        mask, values, scores = inputs.mask, inputs.experience.values, inputs.token_rewards(inputs.rewards)
        advantages, returns = gae(scores, values, mask, gamma=self.gamma, lam=self.gae_lambda)
        if self.policy_lambda or self.length_alpha:
            lam = length_adaptive_lambda(mask, alpha=self.length_alpha) if self.length_alpha else self.policy_lambda
            advantages, _ = gae(scores, values, mask, gamma=self.gamma, lam=lam)
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
        returns = inputs.returns(inputs.token_rewards(inputs.rewards), gamma=self.gamma)
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
