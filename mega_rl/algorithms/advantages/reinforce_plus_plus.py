"""REINFORCE++: returns of token rewards with a KL penalty, whitened over the global batch.

Source: Hu et al. 2025, arXiv:2501.03262. Alignment and masks of all tensors:
`mega_rl.algorithms.advantages.base`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mega_rl.algorithms.advantages.gae import gae
from mega_rl.algorithms.advantages.groups import Groups
from mega_rl.algorithms.advantages.tokens import token_rewards
from mega_rl.algorithms.statistics import SumOverRanks, identity, whiten


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


def reinforce_plus_plus_baseline(
    rewards: Tensor,
    group_ids: Tensor,
    mask: Tensor,
    kl_penalty: Tensor | None = None,
    *,
    sum_over_ranks: SumOverRanks = identity,
) -> Tensor:
    """REINFORCE++ advantages of score_i = r_i - mean(group), several samples of a prompt; float32 [B, S].

    rewards [B] float32; group_ids [B] int64, rows of one prompt share an id and are all on this rank. No discount.
    """
    scores = Groups.of(group_ids, mask).centred(rewards).float()
    return reinforce_plus_plus(scores, mask, kl_penalty, sum_over_ranks=sum_over_ranks)
