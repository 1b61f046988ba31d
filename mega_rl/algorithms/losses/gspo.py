"""Group sequence policy optimization: the clipped objective with one ratio for all tokens of a response.

    s    = exp(mean of log_ratio over the response)
    s_t  = sg(s) * p_t / sg(p_t)                             sg: a constant; in value s_t is s
    loss = max(-A_t * s_t, -A_t * clip(s_t, 1 - clip_low, 1 + clip_high))

This is the paper's GSPO-token. Where all tokens of a response have one advantage it is GSPO itself, in value and in
gradient: d s / d theta = s * mean of d log p_t / d theta. Where a critic gives each token its own, each keeps it. The
bounds are some thousand times narrower than PPO's: a mean over a response moves so much less than one token.
Source: Zheng et al. 2025, arXiv:2507.18071, eq. 5, 7, 13 and 14; bounds: section 5.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mega_rl.algorithms.losses.base import PolicyTokens
from mega_rl.config.schema.algorithms import GSPOSettings


@dataclass(frozen=True)
class GSPO(GSPOSettings):
    """The clipped objective of whole responses.

    Token means: actor/sequence_ratio_mean (s), actor/clip_fraction_high, actor/clip_fraction_low (tokens of responses
    whose gradient the upper or lower bound cut off).
    """

    def __call__(self, tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        sequences, advantages = tokens.sequences, tokens.advantages
        of_response = sequences.spread(sequences.mean(tokens.log_ratio.detach()).exp())
        ratio = of_response * (tokens.logprobs - tokens.logprobs.detach()).exp()
        unclipped = -advantages * ratio
        clipped = -advantages * ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        cut = clipped > unclipped
        return torch.maximum(unclipped, clipped), {
            "actor/sequence_ratio_mean": tokens.mean(of_response),
            "actor/clip_fraction_high": tokens.mean((cut & (advantages > 0)).float()),
            "actor/clip_fraction_low": tokens.mean((cut & (advantages < 0)).float()),
        }
