"""Divergence proximal policy optimization: a trust region by how far a token's probability has moved.

    loss = -M * sg(min(ratio, cap)) * A * log p             sg: a constant
    M    = 0 where D > threshold and the gradient would raise D: A > 0 and p > q, or A < 0 and p < q; else 1
    D    = |p - q|                                                        `dppo_tv`
           q log(q / p) + (1 - q) log((1 - q) / (1 - p))                  `dppo_kl`

p and q are the new and the old probability of the sampled token; D is the divergence of the distributions "this token
or another", a lower bound of that of the whole vocabulary. A ratio of 2 is nothing for a token of probability 1e-4 and
a lot for one of 0.4: PPO's clip holds back the first as much as the second.
Source: Qi et al. 2026, arXiv:2602.04879; cap: section 5.4; thresholds: the authors' recipes. The paper's q is that of
the sampler, as here with algorithm.old_logprobs=rollout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mega_rl.algorithms.losses.base import PolicyTokens
from mega_rl.config.schema.algorithms import DPPOKLSettings, DPPOTVSettings

SMALLEST = 1e-7  # of 1 - p, whose logarithm is taken: half a rounding of 1 in float32


@dataclass(frozen=True)
class DPPOTV(DPPOTVSettings):
    """The trust region of total variation. Token mean: actor/masked_fraction (tokens without a gradient)."""

    def __call__(self, tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        new, old = tokens.logprobs.detach(), (tokens.logprobs - tokens.log_ratio).detach()
        return masked_objective(tokens, (new.exp() - old.exp()).abs() > self.threshold, cap=self.cap)


@dataclass(frozen=True)
class DPPOKL(DPPOKLSettings):
    """The trust region of the KL divergence. Token mean: actor/masked_fraction (tokens without a gradient)."""

    def __call__(self, tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        new, old = tokens.logprobs.detach(), (tokens.logprobs - tokens.log_ratio).detach()
        other_new, other_old = (-torch.expm1(x).clamp(max=-SMALLEST) for x in (new, old))
        divergence = old.exp() * (old - new) + other_old * (other_old / other_new).log()
        return masked_objective(tokens, divergence > self.threshold, cap=self.cap)


def masked_objective(tokens: PolicyTokens, far: Tensor, *, cap: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (loss of each token, token means); `far`, bool: tokens outside the trust region."""
    change = tokens.log_ratio.detach()
    masked = far & (change * tokens.advantages > 0)
    weight = torch.where(masked, 0.0, change.exp().clamp(max=cap))
    return -weight * tokens.advantages * tokens.logprobs, {"actor/masked_fraction": tokens.mean(masked.float())}
