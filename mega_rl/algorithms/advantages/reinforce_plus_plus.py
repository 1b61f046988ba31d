"""REINFORCE++: returns of token rewards with a KL penalty, whitened over the global batch.

Source: Hu et al. 2025, arXiv:2501.03262. Alignment and masks of all tensors: `mega_rl.algorithms.advantages.base`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mega_rl.algorithms.advantages.base import AdvantageInputs
from mega_rl.algorithms.advantages.gae import gae
from mega_rl.algorithms.advantages.tokens import token_rewards
from mega_rl.algorithms.statistics import SumOverRanks, identity, whiten
from mega_rl.config.schema.algorithms import ReinforcePlusPlusSettings


@dataclass(frozen=True)
class ReinforcePlusPlus(ReinforcePlusPlusSettings):
    """Whitened returns of token rewards, which may hold a KL penalty; needs no critic."""

    def __call__(self, inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
        mask, sums = inputs.experience.loss_mask, inputs.sum_over_ranks
        advantages = reinforce_plus_plus(inputs.rewards, mask, inputs.kl_penalty, gamma=self.gamma, sum_over_ranks=sums)
        return advantages, torch.zeros_like(advantages)


def reinforce_plus_plus(
    scores: Tensor,
    mask: Tensor,
    kl_penalty: Tensor | None = None,
    *,
    gamma: float = 1.0,
    sum_over_ranks: SumOverRanks = identity,
) -> Tensor:
    """REINFORCE++ advantages [B, S] float32, 0 off the mask: mean 0, variance 1 over the tokens of all ranks.

        r_t = score * [t is the last response token] - kl_penalty_t
        G_t = r_t + gamma * G_{t+1}
        A_t = (G_t - mean(G)) / std(G)

    scores [B] float32; mask [B, S] bool; kl_penalty [B, S] float32, coefficient times log(policy / reference).
    """
    rewards = token_rewards(scores, mask, kl_penalty)
    returns, _ = gae(rewards, torch.zeros_like(rewards), mask, gamma=gamma, lam=1.0)
    return whiten(returns, mask, sum_over_ranks=sum_over_ranks)
