"""Clipped importance-sampling policy optimization: the ratio is a capped weight, and no token loses its gradient.

    loss = -sg(min(ratio, cap)) * A * log p                 sg: a constant

PPO's clip silences a token once it has moved far enough, and rare tokens move far at once: those that begin a new line
of thought. Here a token's gradient is never 0, only its weight is bounded.
Source: MiniMax 2025 (MiniMax-M1), arXiv:2506.13585, which has no lower bound in practice; the cap, 4 to 8
without a difference: Khatri et al. 2025 (ScaleRL), arXiv:2510.13786.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mega_rl.algorithms.losses.base import PolicyTokens
from mega_rl.config.schema.algorithms import CISPOSettings


@dataclass(frozen=True)
class CISPO(CISPOSettings):
    """REINFORCE with capped ratios as weights.

    Token mean: actor/capped_fraction (tokens whose ratio is above the cap).
    """

    def __call__(self, tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = tokens.log_ratio.detach().exp()
        token_loss = -ratio.clamp(max=self.cap) * tokens.advantages * tokens.logprobs
        return token_loss, {"actor/capped_fraction": tokens.mean((ratio > self.cap).float())}
