"""ReMax: returns relative to the reward of the greedy response to the same prompt.

Source: Li et al. 2023, arXiv:2310.10505, section 4. Alignment and masks of all tensors:
`mega_rl.algorithms.advantages.base`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mega_rl.algorithms.advantages.base import AdvantageInputs
from mega_rl.algorithms.advantages.gae import gae
from mega_rl.algorithms.advantages.tokens import token_rewards
from mega_rl.config.schema.algorithms import ReMaxSettings


@dataclass(frozen=True)
class ReMax(ReMaxSettings):
    """Returns of token rewards less the reward of the prompt's greedy response; needs no critic."""

    def __call__(self, inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
        assert inputs.greedy_rewards is not None
        advantages = remax(inputs.rewards, inputs.greedy_rewards, inputs.experience.loss_mask, inputs.kl_penalty)
        return advantages, torch.zeros_like(advantages)


def remax(rewards: Tensor, greedy_rewards: Tensor, mask: Tensor, kl_penalty: Tensor | None = None) -> Tensor:
    """ReMax advantages [B, S] float32, 0 off the mask.

        r_t = r * [t is the last response token] - kl_penalty_t
        A_t = sum of r_s over s >= t, minus the reward of the greedy response to the prompt

    rewards, greedy_rewards [B] float32; mask [B, S] bool; kl_penalty [B, S] float32, coefficient times log(policy /
    reference). The baseline does not depend on the sample, so the gradient has no bias. A row whose prompt has no
    greedy reward (NaN, since that sample failed) gives 0.
    """
    tokens = token_rewards(rewards, mask, kl_penalty)
    returns, _ = gae(tokens, torch.zeros_like(tokens), mask, gamma=1.0, lam=1.0)
    known = mask & ~greedy_rewards.isnan()[:, None]
    return torch.where(known, returns - greedy_rewards[:, None], 0.0)
