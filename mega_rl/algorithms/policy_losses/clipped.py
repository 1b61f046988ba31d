"""Policy losses with a clipped ratio, of tokens or of responses, and those that hold back what loses entropy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mega_rl.algorithms.policy_losses import LossKind
from mega_rl.config.setting import setting

if TYPE_CHECKING:
    from torch import Tensor

    from mega_rl.algorithms.losses import PolicyTokens, TokenLoss


@dataclass(frozen=True, kw_only=True)
class DualClipped(LossKind):
    """A loss whose objective is bounded where the advantage is negative."""

    dual_clip: float = setting(
        3.0, "Ratio above 1 that bounds the objective of tokens of negative advantage; 0 turns it off.", min=0.0
    )

    def problems(self) -> Iterator[str]:
        if 0 < self.dual_clip <= 1:
            yield f"dual_clip={self.dual_clip:g}: legal: 0 (off) or above 1"


@dataclass(frozen=True)
class PPO(DualClipped):
    """The clipped objective of PPO, which GRPO uses too.

        ratio = exp(log_ratio)
        loss  = max(-A * ratio, -A * clip(ratio, 1 - clip_low, 1 + clip_high))
        loss  = min(loss, -A * dual_clip)      where A < 0 and dual_clip > 0

    Token means: actor/clip_fraction_high, actor/clip_fraction_low (tokens whose gradient the upper or lower bound cut
    off), actor/clip_fraction_dual with dual_clip.
    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7; dual clip: Ye et al. 2020, arXiv:1912.09729, eq. 5; separate
    bounds: Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 10.
    """

    name = "ppo"

    clip_low: float = setting(0.2, "The ratio is clipped at 1 - clip_low.", above=0.0, max=1.0)
    clip_high: float = setting(0.28, "The ratio is clipped at 1 + clip_high.", above=0.0)

    def __call__(self, tokens: PolicyTokens) -> TokenLoss:
        import torch

        ratio, advantages = tokens.log_ratio.exp(), tokens.advantages
        unclipped = -advantages * ratio
        clipped = -advantages * ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        token_loss = torch.maximum(unclipped, clipped)
        sums = _clip_fractions(tokens, clipped > unclipped, advantages)
        if self.dual_clip > 0.0:
            bound = -advantages * self.dual_clip
            beyond = (advantages < 0) & (token_loss > bound)
            token_loss = torch.where(beyond, bound, token_loss)
            sums["actor/clip_fraction_dual"] = tokens.mean(beyond.float())
        return token_loss, sums


@dataclass(frozen=True)
class GSPO(LossKind):
    """Group sequence policy optimization: the clipped objective with one ratio for all tokens of a response.

        s    = exp(mean of log_ratio over the response)
        s_t  = sg(s) * p_t / sg(p_t)                             sg: a constant; in value s_t is s
        loss = max(-A_t * s_t, -A_t * clip(s_t, 1 - clip_low, 1 + clip_high))

    This is the paper's GSPO-token: if all tokens of a response have one advantage it is GSPO itself, in value and in
    gradient. The bounds are narrower than PPO's, as a mean over a response moves less than one token.
    Token means: actor/sequence_ratio_mean (s), actor/clip_fraction_high, actor/clip_fraction_low (tokens of responses
    whose gradient the upper or lower bound cut off).
    Source: Zheng et al. 2025, arXiv:2507.18071, eq. 5, 7, 13 and 14; bounds: section 5.1.
    """

    name = "gspo"
    needs_response_mean = True

    clip_low: float = setting(3e-4, "The ratio is clipped at 1 - clip_low.", above=0.0, max=1.0)
    clip_high: float = setting(4e-4, "The ratio is clipped at 1 + clip_high.", above=0.0)

    def __call__(self, tokens: PolicyTokens) -> TokenLoss:
        import torch

        sequences, advantages = tokens.sequences, tokens.advantages
        of_response = sequences.spread(sequences.mean(tokens.log_ratio.detach()).exp())
        ratio = of_response * (tokens.logprobs - tokens.logprobs.detach()).exp()
        unclipped = -advantages * ratio
        clipped = -advantages * ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        fractions = _clip_fractions(tokens, clipped > unclipped, advantages)
        return torch.maximum(unclipped, clipped), {"actor/sequence_ratio_mean": tokens.mean(of_response), **fractions}


@dataclass(frozen=True)
class GMPO(LossKind):
    """Geometric-mean policy optimization: the geometric mean of a response's clipped token ratios.

        l_t  = min(log_ratio, clip_high)     where A > 0
               max(log_ratio, -clip_low)     where A <= 0
        loss = -A * exp(mean of l_t over the response)          A: mean of the response's advantages

    One outlier among n tokens moves the geometric mean by its n-th root, so the bounds on single tokens may be wide.
    Token means: actor/sequence_ratio_mean (the geometric mean), actor/clip_fraction_high, actor/clip_fraction_low
    (tokens whose gradient the upper or lower bound cut off).
    Source: Zhao et al. 2025, arXiv:2507.20673, whose experiments have these bounds.
    """

    name = "gmpo"
    needs_response_mean = True
    needs_response_advantages = True

    clip_low: float = setting(0.4, "Log ratios are clipped at -clip_low where the advantage is negative.", above=0.0)
    clip_high: float = setting(0.4, "Log ratios are clipped at clip_high where the advantage is positive.", above=0.0)

    def __call__(self, tokens: PolicyTokens) -> TokenLoss:
        import torch

        sequences, log_ratio = tokens.sequences, tokens.log_ratio
        advantages = sequences.spread(sequences.mean(tokens.advantages))
        gains = advantages > 0
        clipped = torch.where(gains, log_ratio.clamp(max=self.clip_high), log_ratio.clamp(min=-self.clip_low))
        ratio = sequences.spread(sequences.mean(clipped).exp())
        fractions = _clip_fractions(tokens, clipped != log_ratio, advantages)
        return -advantages * ratio, {"actor/sequence_ratio_mean": tokens.mean(ratio), **fractions}


@dataclass(frozen=True)
class ClipCov(PPO):
    """PPO's loss without a gradient for the tokens that would reduce the entropy most.

        c    = A * (log p - mean of log p over the response)             covariance of a token, nats
        loss = that of PPO; no gradient where c >= threshold

    A step changes the entropy by minus the covariance of advantage and log-prob, which very few tokens make up. The
    paper takes a share of a batch's tokens; here a threshold does, and log-probs are centred over their response, so
    that nothing depends on which tokens share a micro-batch.
    Token means: PPO's, actor/covariance_fraction (tokens held back).
    Source: Cui et al. 2025, arXiv:2505.22617, section 4.
    """

    name = "clip_cov"

    threshold: float = setting(
        5.0, "Covariance of advantage and log-prob from which a token gives no gradient.", unit="nats", above=0.0
    )

    def __call__(self, tokens: PolicyTokens) -> TokenLoss:
        import torch

        token_loss, means = PPO(self.clip_low, self.clip_high, dual_clip=self.dual_clip)(tokens)
        held = covariance(tokens) >= self.threshold
        means["actor/covariance_fraction"] = tokens.mean(held.float())
        return torch.where(held, token_loss.detach(), token_loss), means


@dataclass(frozen=True)
class KLCov(DualClipped):
    """The unclipped objective with a penalty on the tokens that would reduce the entropy most, as in `ClipCov`.

        loss = -A * ratio, + coef * |log_ratio| where c >= threshold; bounded by dual_clip as PPO's

    Token mean: actor/covariance_fraction (tokens held back).
    Source: Cui et al. 2025, arXiv:2505.22617, section 4; |log_ratio|: the authors' code.
    """

    name = "kl_cov"
    needs_updates = True

    threshold: float = setting(
        3.0, "Covariance of advantage and log-prob from which a token is held back.", unit="nats", above=0.0
    )
    coef: float = setting(1.0, "Weight of these tokens' |log ratio| in the loss.", above=0.0)

    def __call__(self, tokens: PolicyTokens) -> TokenLoss:
        import torch

        token_loss = -tokens.advantages * tokens.log_ratio.exp()
        if self.dual_clip > 0.0:
            bound = -tokens.advantages * self.dual_clip
            token_loss = torch.where(tokens.advantages < 0, torch.minimum(token_loss, bound), token_loss)
        held = (covariance(tokens) >= self.threshold).to(token_loss.dtype)
        return token_loss + self.coef * held * tokens.log_ratio.abs(), {"actor/covariance_fraction": tokens.mean(held)}


def _clip_fractions(tokens: PolicyTokens, cut: Tensor, advantages: Tensor) -> dict[str, Tensor]:
    """Return the token means of the tokens that the upper and the lower bound cut off."""
    return {
        "actor/clip_fraction_high": tokens.mean((cut & (advantages > 0)).float()),
        "actor/clip_fraction_low": tokens.mean((cut & (advantages < 0)).float()),
    }


def covariance(tokens: PolicyTokens) -> Tensor:
    """Return each token's share of the covariance of advantage and log-prob, nats; without gradient."""
    logprobs = tokens.logprobs.detach()
    return tokens.advantages * (logprobs - tokens.sequences.spread(tokens.sequences.mean(logprobs)))
