"""Advantages that are returns of token rewards. Alignment and masks of all tensors: `advantages.base`.

The response tokens of a row need not be adjacent: between two turns of a conversation are tokens that the policy did
not sample, such as a tool's answer. They are off the mask and not steps of the policy, so the successor of a response
token is the next response token of its row. `mask` is [B, S] bool, rewards of rows are [B] float32, those of tokens
[B, S]; kl_penalty [B, S] float32 is the coefficient times log(policy / reference). Results are [B, S] float32, 0 off
the mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mega_rl.algorithms.advantages.base import AdvantageInputs, without_values
from mega_rl.algorithms.advantages.groups import PromptGroups, rloo
from mega_rl.algorithms.statistics import SumOverRanks, identity, whiten
from mega_rl.config.schema import algorithms as settings


@dataclass(frozen=True)
class GAE(settings.GAESettings):
    """Generalized advantage estimation (`gae`) over a critic's values; token rewards may hold a KL penalty.

    The policy's lambda may differ from that of the critic's targets. Source: Yuan et al. 2025 (VC-PPO),
    arXiv:2503.01491, decoupled GAE; Yue et al. 2025 (VAPO), arXiv:2504.05118.
    """

    def __call__(self, inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
        experience, mask = inputs.experience, inputs.experience.loss_mask
        scores = token_rewards(inputs.rewards, mask, inputs.kl_penalty)
        advantages, returns = gae(scores, experience.values, mask, gamma=self.gamma, lam=self.gae_lambda)
        if self.policy_lambda or self.length_alpha:
            lam = length_adaptive_lambda(mask, alpha=self.length_alpha) if self.length_alpha else self.policy_lambda
            advantages, _ = gae(scores, experience.values, mask, gamma=self.gamma, lam=lam)
        if self.whiten:
            advantages = whiten(advantages, mask, sum_over_ranks=inputs.sum_over_ranks)
        return advantages, returns


def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return (advantages, returns) of generalized advantage estimation.

        delta_t = r_t + gamma * V_{t+1} - V_t
        A_t     = delta_t + gamma * lam * A_{t+1}
        R_t     = A_t + V_t

    rewards of tokens, values [B, S] float32; lam of all rows or [B, 1] float64. t counts the response tokens of a row,
    so tokens between two turns neither discount nor have a value. V_t is the value just before token t
    is emitted; after the last response token both V and A are 0: a response ends the episode, also one cut off by
    length. Source: Schulman et al. 2016, arXiv:1506.02438, eq. 11-16.
    """
    order = response_order(mask)
    active = mask.gather(1, order)
    rewards, values = (torch.where(active, x.float().gather(1, order), 0.0) for x in (rewards, values))
    next_values = torch.zeros_like(values)
    next_values[:, :-1] = values[:, 1:]
    deltas = torch.where(active, rewards + gamma * next_values - values, 0.0)
    advantages = discounted_sums(deltas, gamma * lam)
    blank = torch.zeros_like(advantages)
    return blank.scatter(1, order, advantages), blank.scatter(1, order, advantages + values)


def discounted_sums(x: Tensor, decay: float | Tensor) -> Tensor:
    """Return y_t = x_t + decay * y_{t+1} of each row, 0 behind its end: [B, S] as x.

    decay of all rows, or [B, 1] float64. It takes ceil(log2 S) vector steps: after step k of the doubling scan each
    token holds the sum of its next 2^k.
    Padding a row further adds exact zeros, so the result does not depend on S.
    """
    span, length = 1, x.shape[1]
    while span < length:
        later = torch.zeros_like(x)
        later[:, :-span] = x[:, span:]
        x = x + torch.as_tensor(decay**span, dtype=x.dtype) * later
        span *= 2
    return x


def response_order(mask: Tensor) -> Tensor:
    """Return [B, S] int64, the columns of each row with response tokens first, otherwise in their order.

    `x.gather(1, order)` puts the response tokens of a row next to each other, `zeros.scatter(1, order, y)` puts them
    back.
    """
    assert mask.dtype == torch.bool, f"the loss mask is {mask.dtype}, not bool"
    return torch.argsort(~mask, dim=1, stable=True)


def last_response_token(mask: Tensor) -> Tensor:
    """Return [B, S] bool, True on the last response token of each row; a row without a response has none."""
    assert mask.dtype == torch.bool, f"the loss mask is {mask.dtype}, not bool"
    return mask & (mask.cumsum(dim=1) == mask.sum(dim=1, keepdim=True))


def token_rewards(rewards: Tensor, mask: Tensor, kl_penalty: Tensor | None = None) -> Tensor:
    """Return token rewards: the score on the last response token, minus the KL penalty of each token.

        r_t = score * [t is the last response token] - kl_penalty_t

    The score of a row without response tokens is dropped.
    Source: Ziegler et al. 2019, arXiv:1909.08593, eq. 2; Ouyang et al. 2022, arXiv:2203.02155.
    """
    out = torch.where(last_response_token(mask), rewards.to(torch.float32)[:, None], 0.0)
    if kl_penalty is not None:
        out = out - torch.where(mask, kl_penalty, 0.0)
    return out


def length_adaptive_lambda(mask: Tensor, *, alpha: float) -> Tensor:
    """Return a lambda for each row, [B, 1] float64, whose weights of TD errors sum to alpha times the length.

        lambda = 1 - 1 / (alpha * l), at least 0      since sum of lambda^t over t = 0, 1, ... is 1 / (1 - lambda)

    l is the number of the row's response tokens. A constant lambda of 0.95 forgets the score within some 60 tokens.
    Source: Yue et al. 2025 (VAPO), arXiv:2504.05118, where alpha is 0.05.
    """
    lengths = mask.sum(dim=1, keepdim=True).double().clamp(min=1)
    return (1 - 1 / (alpha * lengths)).clamp(min=0)


@dataclass(frozen=True)
class ReMax(settings.ReMaxSettings):
    """Returns of token rewards less the reward of the prompt's greedy response, as `remax`; needs no critic."""

    def __call__(self, inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
        assert inputs.greedy_rewards is not None
        return without_values(
            remax(inputs.rewards, inputs.greedy_rewards, inputs.experience.loss_mask, inputs.kl_penalty)
        )


def remax(rewards: Tensor, greedy_rewards: Tensor, mask: Tensor, kl_penalty: Tensor | None = None) -> Tensor:
    """Return ReMax advantages: returns relative to the reward of the greedy response to the same prompt.

        r_t = r * [t is the last response token] - kl_penalty_t
        A_t = sum of r_s over s >= t, minus the reward of the greedy response to the prompt

    The baseline does not depend on the sample, so the gradient has no bias. A row whose prompt has no greedy reward
    (NaN, since that sample failed) gives 0.
    Source: Li et al. 2023, arXiv:2310.10505, section 4.
    """
    tokens = token_rewards(rewards, mask, kl_penalty)
    returns, _ = gae(tokens, torch.zeros_like(tokens), mask, gamma=1.0, lam=1.0)
    known = mask & ~greedy_rewards.isnan()[:, None]
    return torch.where(known, returns - greedy_rewards[:, None], 0.0)


@dataclass(frozen=True)
class ReinforcePlusPlus(settings.ReinforcePlusPlusSettings):
    """Whitened returns of token rewards, which may hold a KL penalty, as `reinforce_plus_plus`; needs no critic."""

    def __call__(self, inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
        mask, sums = inputs.experience.loss_mask, inputs.sum_over_ranks
        return without_values(
            reinforce_plus_plus(inputs.rewards, mask, inputs.kl_penalty, gamma=self.gamma, sum_over_ranks=sums)
        )


@dataclass(frozen=True)
class ReinforcePlusPlusBaseline(settings.ReinforcePlusPlusBaselineSettings):
    """REINFORCE++ of rewards less the mean of the prompt's samples, without discount; needs no critic.

        score_i = r_i - mean(group)

    A group of equal rewards scores exactly 0 on each of its rows, which whitening may shift.
    Source: Hu et al. 2025, arXiv:2501.03262.
    """

    def __call__(self, inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
        mask = inputs.experience.loss_mask
        scores = PromptGroups.of(inputs.experience.prompt_index, mask).centred(inputs.rewards).float()
        return without_values(
            reinforce_plus_plus(scores, mask, inputs.kl_penalty, sum_over_ranks=inputs.sum_over_ranks)
        )


def reinforce_plus_plus(
    scores: Tensor,
    mask: Tensor,
    kl_penalty: Tensor | None = None,
    *,
    gamma: float = 1.0,
    sum_over_ranks: SumOverRanks = identity,
) -> Tensor:
    """Return REINFORCE++ advantages: mean 0, variance 1 over the tokens of all ranks.

        r_t = score * [t is the last response token] - kl_penalty_t
        G_t = r_t + gamma * G_{t+1}
        A_t = (G_t - mean(G)) / std(G)

    Source: Hu et al. 2025, arXiv:2501.03262.
    """
    rewards = token_rewards(scores, mask, kl_penalty)
    returns, _ = gae(rewards, torch.zeros_like(rewards), mask, gamma=gamma, lam=1.0)
    return whiten(returns, mask, sum_over_ranks=sum_over_ranks)


@dataclass(frozen=True)
class Distillation(settings.DistillationSettings):
    """Log-prob of the teacher, which is the reference, less the student's, as `distillation`; needs no rewards."""

    def __call__(self, inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
        experience, mask = inputs.experience, inputs.experience.loss_mask
        advantages = distillation(experience.old_logprobs, experience.ref_logprobs, mask, gamma=self.gamma)
        if self.reward_weight:
            advantages = advantages + self.reward_weight * rloo(inputs.rewards, experience.prompt_index, mask)
        return without_values(advantages)


def distillation(student: Tensor, teacher: Tensor, mask: Tensor, *, gamma: float = 0.0) -> Tensor:
    """Return advantages of on-policy distillation: a teacher judges each of the student's own tokens.

        A_t = sum over k >= t of gamma^(k - t) * (log q(y_k) - log p(y_k))

    student, teacher [B, S] float32, the log-probs of the sampled tokens under p and q; k counts the response tokens of
    the row. With gamma 1 the mean of A_t grad log p(y_t) is the descent of KL(p || q) over whole responses. With gamma
    0 each token answers for itself: that of the KL at the sampled prefixes, without the part that steers towards
    prefixes on which both agree, and of far smaller variance.
    Source: Agarwal et al. 2023 (GKD), arXiv:2306.13649, on-policy with the reverse KL; Lu et al. 2025, "On-Policy
    Distillation" (Thinking Machines Lab), whose per-token form discounts by 0.
    """
    gaps = torch.where(mask, teacher.float() - student.float(), 0.0)
    returns, _ = gae(gaps, torch.zeros_like(gaps), mask, lam=1.0, gamma=gamma)
    return returns
