"""Generalized advantage estimation (Schulman et al. 2016, arXiv:1506.02438) over token rewards with a KL penalty.

Alignment and masks of all tensors: `mega_rl.algorithms.advantages.base`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mega_rl.algorithms.advantages.base import AdvantageInputs
from mega_rl.algorithms.advantages.tokens import length_adaptive_lambda, response_order, token_rewards
from mega_rl.algorithms.discounted_sums import discounted_sums
from mega_rl.algorithms.statistics import whiten
from mega_rl.config.schema.algorithms import GAESettings


@dataclass(frozen=True)
class GAE(GAESettings):
    """Generalized advantage estimation over a critic's values, of token rewards that may hold a KL penalty.

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
    """Generalized advantage estimation: (advantages, returns), both [B, S] float32, 0 off the mask.

        delta_t = r_t + gamma * V_{t+1} - V_t
        A_t     = delta_t + gamma * lam * A_{t+1}
        R_t     = A_t + V_t

    rewards of tokens, values [B, S] float32; mask [B, S] bool; lam of all rows or [B, 1] float64. t counts the response
    tokens of a row, so tokens between two turns neither discount nor have a value. V_t is the value just before token t
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
