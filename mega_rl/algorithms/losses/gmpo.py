"""Geometric-mean policy optimization: the geometric mean of a response's clipped token ratios.

    l_t  = min(log_ratio, clip_high)     where A > 0
           max(log_ratio, -clip_low)     where A <= 0
    loss = -A * exp(mean of l_t over the response)          A: mean of the response's advantages

One outlier among n tokens moves the geometric mean by its n-th root, so the bounds on single tokens may be wide: they
are e^-0.4 and e^0.4. Each token is clipped before the mean, and only in the direction that would raise the objective.
Source: Zhao et al. 2025, arXiv:2507.20673, whose experiments have these bounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mega_rl.algorithms.losses.base import PolicyTokens
from mega_rl.config.schema.algorithms import GMPOSettings


@dataclass(frozen=True)
class GMPO(GMPOSettings):
    """The geometric mean of clipped token ratios.

    Token means: actor/sequence_ratio_mean (the geometric mean), actor/clip_fraction_high, actor/clip_fraction_low
    (tokens whose gradient the upper or lower bound cut off).
    """

    def __call__(self, tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        sequences, log_ratio = tokens.sequences, tokens.log_ratio
        advantages = sequences.spread(sequences.mean(tokens.advantages))
        gains = advantages > 0
        clipped = torch.where(gains, log_ratio.clamp(max=self.clip_high), log_ratio.clamp(min=-self.clip_low))
        ratio = sequences.spread(sequences.mean(clipped).exp())
        cut = clipped != log_ratio
        return -advantages * ratio, {
            "actor/sequence_ratio_mean": tokens.mean(ratio),
            "actor/clip_fraction_high": tokens.mean((cut & gains).float()),
            "actor/clip_fraction_low": tokens.mean((cut & (advantages < 0)).float()),
        }
