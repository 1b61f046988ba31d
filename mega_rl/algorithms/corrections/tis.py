"""Truncated importance sampling.

    w = min(pi_old / pi_rollout, cap) = min(exp(old_logprob - rollout_logprob), cap)

An expectation over sampled tokens with these weights is one over the old policy's, but for what the cap takes off: it
bounds the variance that a few tokens of large ratio would bring, at the price of a bias. A cap of 1 only ever shrinks a
token's loss. Where the two log-probs are equal the weight is exactly 1 (for cap >= 1).
Source: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (truncated importance
sampling for the mismatch of engines); Fu et al. 2025 (AReaL), arXiv:2505.24298, eq. 5 (decoupled PPO).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mega_rl.algorithms.corrections.base import SampledTokens
from mega_rl.config.schema.algorithms import TISSettings


@dataclass(frozen=True)
class TIS(TISSettings):
    """Truncated importance sampling by token.

    Token means: actor/tis_weight_mean; actor/tis_truncated_fraction, tokens whose ratio is above the cap.
    """

    def __call__(self, tokens: SampledTokens) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = tokens.log_ratio.exp()
        weights = ratio.clamp(max=self.cap)
        metrics = {
            "actor/tis_weight_mean": tokens.mean(weights),
            "actor/tis_truncated_fraction": tokens.mean((ratio > self.cap).float()),
        }
        return weights, metrics
