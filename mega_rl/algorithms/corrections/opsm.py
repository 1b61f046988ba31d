"""Off-policy sequence masking: bad responses that the policy has moved away from are left out.

    w_t = 0   on all tokens of a response with A_t < 0 and mean_t log(pi_rollout / pi) > delta, else 1

pi is the policy now, so the distance holds staleness, mismatch and the updates of this step. A model learns from its
own mistakes; pushing down a response that it would hardly give any more only disturbs it. Good responses stay.
Source: DeepSeek-AI 2025 (DeepSeek-V3.2), arXiv:2512.02556, section 3.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mega_rl.algorithms.corrections.base import SampledTokens
from mega_rl.algorithms.kl import clamped_log_ratio
from mega_rl.config.schema.algorithms import OPSMSettings


@dataclass(frozen=True)
class OPSM(OPSMSettings):
    """Off-policy sequence masking."""

    def __call__(self, tokens: SampledTokens) -> tuple[Tensor, dict[str, Tensor]]:
        distance = tokens.sequences.mean(tokens.of_active(clamped_log_ratio(tokens.rollout_logprobs, tokens.logprobs)))
        is_far = tokens.sequences.spread(distance) > self.delta
        return torch.where(is_far & (tokens.advantages < 0), 0.0, torch.ones_like(tokens.advantages)), {}
