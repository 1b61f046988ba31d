"""IcePop: importance weights of tokens inside a band, and none of those outside.

    r_t = pi_old / pi_rollout
    w_t = r_t   where low <= r_t <= high, else 0

A token that the two policies see so differently is not scaled but left out: its gradient is noise of the mismatch.
Source: Ling Team 2025, arXiv:2510.18855, section on IcePop.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mega_rl.algorithms.corrections.base import SampledTokens
from mega_rl.config.schema.algorithms import IcePopSettings


@dataclass(frozen=True)
class IcePop(IcePopSettings):
    """Importance weights inside a band."""

    def __call__(self, tokens: SampledTokens) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = tokens.log_ratio.exp()
        return torch.where((ratio >= self.low) & (ratio <= self.high), ratio, 0.0), {}
