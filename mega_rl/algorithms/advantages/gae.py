"""Generalized advantage estimation (Schulman et al. 2016, arXiv:1506.02438) over token rewards with a KL penalty.

Alignment and masks of all tensors: `mega_rl.algorithms.advantages.base`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mega_rl.algorithms.advantages.base import is_one_run, last_response_token
from mega_rl.algorithms.kl import KLController, KLEstimator
from mega_rl.algorithms.statistics import SumOverRanks, whiten
from mega_rl.types import Experience


@dataclass(frozen=True)
class GAEAdvantages:
    """Generalized advantage estimation over a critic's values, with the KL penalty in the token rewards if asked."""

    gamma: float
    gae_lambda: float
    whiten: bool
    kl: KLController | None  # KL in the reward; None without
    kl_estimator: KLEstimator

    def __call__(self, experience: Experience, rewards: Tensor, sum_over_ranks: SumOverRanks) -> tuple[Tensor, Tensor]:
        mask = experience.loss_mask
        penalty = None
        if self.kl is not None:
            penalty = self.kl_estimator(experience.old_logprobs, experience.ref_logprobs)
        scores = token_rewards(rewards, mask, penalty, kl_coef=0.0 if self.kl is None else self.kl.value)
        advantages, returns = gae(scores, experience.values, mask, gamma=self.gamma, lam=self.gae_lambda)
        if self.whiten:
            advantages = whiten(advantages, mask, sum_over_ranks=sum_over_ranks)
        return advantages, returns


def token_rewards(rewards: Tensor, mask: Tensor, kl: Tensor | None = None, *, kl_coef: float = 0.0) -> Tensor:
    """Per-token rewards [B, S] float32: the score on the last response token, minus the KL penalty of each token.

        r_t = score * [t is the last response token] - kl_coef * kl_t

    rewards [B] float32; mask [B, S] bool; kl [B, S] float32, any estimate of log(policy / reference). The score of a
    row without response tokens has no token to stand on and is dropped.
    Source: Ziegler et al. 2019, arXiv:1909.08593, eq. 2; Ouyang et al. 2022, arXiv:2203.02155.
    """
    assert is_one_run(mask), "response tokens must form one contiguous run per row"
    out = torch.where(last_response_token(mask), rewards.to(torch.float32)[:, None], 0.0)
    if kl is not None:
        out = out - kl_coef * torch.where(mask, kl, 0.0)
    return out


def gae(token_rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation: (advantages, returns), both [B, S] float32, 0 off the mask.

        delta_t = r_t + gamma * V_{t+1} - V_t
        A_t     = delta_t + gamma * lam * A_{t+1}
        R_t     = A_t + V_t

    token_rewards, values [B, S] float32; mask [B, S] bool. V_t is the value just before token t is emitted; after the
    last response token both V and A are 0: a response ends the episode, also one cut off by length.

    The recursion runs as a doubling scan, ceil(log2 S) vector steps instead of S: after step k each position holds the
    discounted sum of its next 2^k deltas. Padding a row further adds exact zeros, so the result does not depend on S.
    Source: Schulman et al. 2016, arXiv:1506.02438, eq. 11-16.
    """
    assert is_one_run(mask), "response tokens must form one contiguous run per row"
    rewards = torch.where(mask, token_rewards.to(torch.float32), 0.0)
    values = torch.where(mask, values.to(torch.float32), 0.0)
    next_values = torch.zeros_like(values)
    next_values[:, :-1] = values[:, 1:]
    advantages = torch.where(mask, rewards + gamma * next_values - values, 0.0)
    decay, span, length = gamma * lam, 1, mask.shape[1]
    while span < length:
        later = torch.zeros_like(advantages)
        later[:, :-span] = advantages[:, span:]
        advantages = advantages + decay**span * later
        span *= 2
    # Prompt positions before the run have gathered the run's discounted sum; they are no part of the answer.
    advantages = torch.where(mask, advantages, 0.0)
    return advantages, torch.where(mask, advantages + values, 0.0)
