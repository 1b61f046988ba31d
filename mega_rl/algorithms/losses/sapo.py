"""Soft adaptive policy optimization: a smooth gate in the place of the clip.

    loss = -A * sigmoid(tau * (ratio - 1)) * 4 / tau        tau: tau_positive where A > 0, else tau_negative

Its derivative by the ratio is -A * 4 g (1 - g), g the sigmoid: -A at a ratio of 1, as without a clip, and falling on
both sides without an edge. The steeper gate for negative advantages damps gradients that raise the logits of all
tokens but the sampled one.
Source: Gao et al. 2025, arXiv:2511.20347, whose experiments have these two tau.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mega_rl.algorithms.losses.base import PolicyTokens
from mega_rl.config.schema.algorithms import SAPOSettings


@dataclass(frozen=True)
class SAPO(SAPOSettings):
    """The gated objective.

    Token mean: actor/gate_mean (4 g (1 - g), the share of each token's gradient that the gate leaves).
    """

    def __call__(self, tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        tau = torch.where(tokens.advantages > 0, self.tau_positive, self.tau_negative)
        gate = torch.sigmoid(tau * (tokens.log_ratio.exp() - 1.0))
        return -tokens.advantages * gate * 4.0 / tau, {"actor/gate_mean": tokens.mean(4.0 * gate * (1.0 - gate))}
