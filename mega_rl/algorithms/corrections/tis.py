"""Truncated importance sampling.

    token:     w_t = min(pi_old / pi_rollout, cap)                  of each token
    sequence:  w   = min(prod_t pi_old / pi_rollout, cap)           of all tokens of a response

An expectation over sampled tokens with these weights is one over the old policy's, but for what the cap takes off: it
bounds the variance that a few large ratios would bring, at the price of a bias. Weights of tokens leave out how likely
the tokens before were, those of sequences do not, and vary with the response's length. Where the log-probs are equal
the weight is exactly 1 (for cap >= 1).
Source: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (truncated importance
sampling for the mismatch of engines); Fu et al. 2025 (AReaL), arXiv:2505.24298, eq. 5 (decoupled PPO); sequences: Liu
et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch".
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mega_rl.algorithms.corrections.base import SampledTokens
from mega_rl.algorithms.kl import LOG_RATIO_LIMIT
from mega_rl.config.schema.algorithms import TISSettings


@dataclass(frozen=True)
class TIS(TISSettings):
    """Truncated importance sampling; token mean actor/tis_truncated_fraction: tokens whose ratio is above the cap."""

    def __call__(self, tokens: SampledTokens) -> tuple[Tensor, dict[str, Tensor]]:
        log_ratio = tokens.log_ratio
        if self.level == "sequence":
            log_ratio = tokens.sequences.spread(tokens.sequences.sum(log_ratio))
        ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        return ratio.clamp(max=self.cap), {"actor/tis_truncated_fraction": tokens.mean((ratio > self.cap).float())}
