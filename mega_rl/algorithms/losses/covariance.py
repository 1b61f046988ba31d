"""Losses that keep the entropy: they hold back the tokens that would reduce it most.

    c    = A * (log p - mean of log p over the response)             covariance of a token, nats
    clip_cov: loss = that of PPO; no gradient where c >= threshold
    kl_cov:   loss = -A * ratio, + coef * |log_ratio| where c >= threshold; bounded by dual_clip as PPO's

A step changes the entropy by minus the covariance of advantage and log-prob, which very few tokens make up. The paper
centres both factors over a batch and takes a share of its tokens, in clip_cov by lot; either would depend on which
tokens share a micro-batch. Here log-probs are centred over their response, advantages are centred as they come, and a
threshold takes the place of the share.
Source: Cui et al. 2025, arXiv:2505.22617, section 4; |log_ratio|: the authors' code.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mega_rl.algorithms.losses.base import PolicyTokens
from mega_rl.algorithms.losses.ppo import PPO
from mega_rl.config.schema.algorithms import ClipCovSettings, KLCovSettings


@dataclass(frozen=True)
class ClipCov(ClipCovSettings):
    """PPO's loss on tokens of small covariance. Token means: PPO's, actor/covariance_fraction (tokens held back)."""

    def __call__(self, tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        token_loss, means = PPO(self.clip_low, self.clip_high, self.dual_clip)(tokens)
        held = covariance(tokens) >= self.threshold
        means["actor/covariance_fraction"] = tokens.mean(held.float())
        return torch.where(held, token_loss.detach(), token_loss), means


@dataclass(frozen=True)
class KLCov(KLCovSettings):
    """The unclipped objective. Token mean: actor/covariance_fraction (tokens held back)."""

    def __call__(self, tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        token_loss = -tokens.advantages * tokens.log_ratio.exp()
        if self.dual_clip > 0.0:
            bound = -tokens.advantages * self.dual_clip
            token_loss = torch.where(tokens.advantages < 0, torch.minimum(token_loss, bound), token_loss)
        held = (covariance(tokens) >= self.threshold).to(token_loss.dtype)
        return token_loss + self.coef * held * tokens.log_ratio.abs(), {"actor/covariance_fraction": tokens.mean(held)}


def covariance(tokens: PolicyTokens) -> Tensor:
    """Return each token's share of the covariance of advantage and log-prob, nats; without gradient."""
    logprobs = tokens.logprobs.detach()
    return tokens.advantages * (logprobs - tokens.sequences.spread(tokens.sequences.mean(logprobs)))
