"""Generalized advantage estimation (Schulman et al. 2016, arXiv:1506.02438) over token rewards with a KL penalty.

Alignment and masks of all tensors: `mega_rl.algorithms.advantages.base`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mega_rl.algorithms.advantages.base import AdvantageInputs, is_one_run, last_response_token
from mega_rl.algorithms.statistics import whiten
from mega_rl.config.schema.algorithms import GAESettings


@dataclass(frozen=True)
class GAE(GAESettings):
    """Generalized advantage estimation over a critic's values, of token rewards that may hold a KL penalty."""

    def __call__(self, inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
        experience, mask = inputs.experience, inputs.experience.loss_mask
        scores = token_rewards(inputs.rewards, mask, inputs.kl_penalty)
        advantages, returns = gae(scores, experience.values, mask, gamma=self.gamma, lam=self.gae_lambda)
        if self.whiten:
            advantages = whiten(advantages, mask, sum_over_ranks=inputs.sum_over_ranks)
        return advantages, returns


def token_rewards(rewards: Tensor, mask: Tensor, kl_penalty: Tensor | None = None) -> Tensor:
    """Per-token rewards [B, S] float32: the score on the last response token, minus the KL penalty of each token.

        r_t = score * [t is the last response token] - kl_penalty_t

    rewards [B] float32; mask [B, S] bool; kl_penalty [B, S] float32, the coefficient times log(policy / reference). The
    score of a row without response tokens has no token to stand on and is dropped.
    Source: Ziegler et al. 2019, arXiv:1909.08593, eq. 2; Ouyang et al. 2022, arXiv:2203.02155.
    """
    assert is_one_run(mask), "response tokens must form one contiguous run per row"
    out = torch.where(last_response_token(mask), rewards.to(torch.float32)[:, None], 0.0)
    if kl_penalty is not None:
        out = out - torch.where(mask, kl_penalty, 0.0)
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
