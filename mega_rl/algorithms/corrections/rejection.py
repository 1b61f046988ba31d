"""Rejection of whole responses that the trainer's policy sees differently from what sampled them.

    geometric:  r = exp(mean_t log(pi_old / pi_rollout))
    sequence:   r = exp(sum_t log(pi_old / pi_rollout))
    w_t = 1     on all tokens of a response where low <= r <= high, else 0

A response far off is left out as a whole, since a single token of it may have led all later ones astray. The geometric
mean does not depend on the length; the product is the ratio of the response's probabilities, and few long ones pass.
Source: Liu et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch".
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mega_rl.algorithms.corrections.base import SampledTokens
from mega_rl.config.schema.algorithms import GeometricRejectionSettings, SequenceRejectionSettings


@dataclass(frozen=True)
class GeometricRejection(GeometricRejectionSettings):
    """Rejection by the mean log ratio of a response."""

    def __call__(self, tokens: SampledTokens) -> tuple[Tensor, dict[str, Tensor]]:
        return _inside(tokens, tokens.sequences.mean(tokens.log_ratio).exp(), low=self.low, high=self.high), {}


@dataclass(frozen=True)
class SequenceRejection(SequenceRejectionSettings):
    """Rejection by the ratio of a response's probabilities."""

    def __call__(self, tokens: SampledTokens) -> tuple[Tensor, dict[str, Tensor]]:
        return _inside(tokens, tokens.sequences.sum(tokens.log_ratio).exp(), low=self.low, high=self.high), {}


def _inside(tokens: SampledTokens, ratios: Tensor, *, low: float, high: float) -> Tensor:
    """Return 1 on tokens of responses whose ratio, in [n], is within the bounds, else 0."""
    return tokens.sequences.spread(((ratios >= low) & (ratios <= high)).float())
