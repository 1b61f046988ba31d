"""The clipped objective of PPO, used by GRPO too.

    ratio = exp(log_ratio)
    loss  = max(-A * ratio, -A * clip(ratio, 1 - clip_low, 1 + clip_high))
    loss  = min(loss, -A * dual_clip)      where A < 0 and dual_clip > 0

Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7; dual clip: Ye et al. 2020, arXiv:1912.09729, eq. 5; separate
bounds: Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 10.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mega_rl.algorithms.losses.base import PolicyTokens
from mega_rl.config.schema.algorithms import PPOSettings


@dataclass(frozen=True)
class PPO(PPOSettings):
    """The clipped objective.

    Token means: actor/clip_fraction_high, actor/clip_fraction_low (tokens whose gradient the upper or lower bound cut
    off), actor/clip_fraction_dual with dual_clip.
    """

    def __call__(self, tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        ratio, advantages = tokens.log_ratio.exp(), tokens.advantages
        unclipped = -advantages * ratio
        clipped = -advantages * ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        token_loss = torch.maximum(unclipped, clipped)
        cut = clipped > unclipped
        sums = {
            "actor/clip_fraction_high": tokens.mean((cut & (advantages > 0)).float()),
            "actor/clip_fraction_low": tokens.mean((cut & (advantages < 0)).float()),
        }
        if self.dual_clip > 0.0:
            bound = -advantages * self.dual_clip
            beyond = (advantages < 0) & (token_loss > bound)
            token_loss = torch.where(beyond, bound, token_loss)
            sums["actor/clip_fraction_dual"] = tokens.mean(beyond.float())
        return token_loss, sums
