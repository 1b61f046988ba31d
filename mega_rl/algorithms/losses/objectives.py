"""Policy losses: from the log-probs and advantages of a micro-batch's tokens to the loss of each token.

`OBJECTIVES` has them by the name that a recipe chooses. A new one is a class here, its settings in
`mega_rl.config.schema.algorithms` and a line in both tables.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mega_rl.algorithms.kl import clamped_log_ratio
from mega_rl.algorithms.sequences import Sequences
from mega_rl.config.schema import algorithms as settings

SMALLEST = 1e-7  # floor of 1 - p before its logarithm: half a rounding of 1 in float32


@dataclass(frozen=True)
class PolicyTokens:
    """Tokens of a micro-batch, packed or padded; all tensors of one shape, float32, 0 where `token_weights` is 0."""

    logprobs: Tensor  # of the policy, with gradient
    log_ratio: Tensor  # to the policy before the update, clamped to +-20 nats, with gradient
    advantages: Tensor
    token_weights: Tensor  # 1 / response tokens of the global mini-batch; 0 on tokens that do not count
    loss_weights: Tensor  # share of the token's loss in the mini-batch's; algorithms.losses.aggregation
    sequences: Sequences  # sums over whole responses; collective under context parallelism
    divergence: Tensor | None = None  # from the teacher of a loss that needs one, nats, with gradient

    @classmethod
    def of(
        cls,
        logprobs: Tensor,
        *,
        old_logprobs: Tensor,
        advantages: Tensor,
        token_weights: Tensor,
        loss_weights: Tensor,
        sequences: Sequences,
        divergence: Tensor | None = None,
    ) -> PolicyTokens:
        """Return the tokens of these fields; values of tokens that do not count, even a NaN, become 0."""
        active = token_weights > 0
        logprobs, old_logprobs, advantages = (torch.where(active, x, 0.0) for x in (logprobs, old_logprobs, advantages))
        log_ratio = clamped_log_ratio(logprobs, old_logprobs)
        divergence = None if divergence is None else torch.where(active, divergence, 0.0)
        return cls(logprobs, log_ratio, advantages, token_weights, loss_weights, sequences, divergence)

    @property
    def active(self) -> Tensor:
        """Return which tokens count; bool."""
        return self.token_weights > 0

    def mean(self, x: Tensor) -> Tensor:
        """Return this micro-batch's share of the mean of x over the mini-batch's tokens; without gradient."""
        return (self.token_weights * x).sum().detach()


TokenLoss = tuple[Tensor, dict[str, Tensor]]


class PolicyObjective(Protocol):
    """A policy loss; its settings as of `config.schema.algorithms.LossSettings`."""

    def __call__(self, tokens: PolicyTokens, /) -> TokenLoss:
        """Return (loss of each token, to be minimised, before `loss_weights`; token means by name: "actor/...")."""
        ...


@dataclass(frozen=True)
class PPO(settings.PPOSettings):
    """The clipped objective of PPO, which GRPO uses too.

        ratio = exp(log_ratio)
        loss  = max(-A * ratio, -A * clip(ratio, 1 - clip_low, 1 + clip_high))
        loss  = min(loss, -A * dual_clip)      where A < 0 and dual_clip > 0

    Token means: actor/clip_fraction_high, actor/clip_fraction_low (tokens whose gradient the upper or lower bound cut
    off), actor/clip_fraction_dual with dual_clip.
    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7; dual clip: Ye et al. 2020, arXiv:1912.09729, eq. 5; separate
    bounds: Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 10.
    """

    def __call__(self, tokens: PolicyTokens) -> TokenLoss:
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


def _clip_fractions(tokens: PolicyTokens, cut: Tensor, advantages: Tensor) -> dict[str, Tensor]:
    """Return the token means of the tokens that the upper and the lower bound cut off."""
    return {
        "actor/clip_fraction_high": tokens.mean((cut & (advantages > 0)).float()),
        "actor/clip_fraction_low": tokens.mean((cut & (advantages < 0)).float()),
    }


@dataclass(frozen=True)
class GSPO(settings.GSPOSettings):
    """Group sequence policy optimization: the clipped objective with one ratio for all tokens of a response.

        s    = exp(mean of log_ratio over the response)
        s_t  = sg(s) * p_t / sg(p_t)                             sg: a constant; in value s_t is s
        loss = max(-A_t * s_t, -A_t * clip(s_t, 1 - clip_low, 1 + clip_high))

    This is the paper's GSPO-token. If all tokens of a response have one advantage it is GSPO itself, in value and in
    gradient: d s / d theta = s * mean of d log p_t / d theta. If a critic gives each token its own, each keeps it. The
    bounds are some thousand times narrower than PPO's: a mean over a response moves so much less than one token.
    Token means: actor/sequence_ratio_mean (s), actor/clip_fraction_high, actor/clip_fraction_low (tokens of responses
    whose gradient the upper or lower bound cut off).
    Source: Zheng et al. 2025, arXiv:2507.18071, eq. 5, 7, 13 and 14; bounds: section 5.1.
    """

    def __call__(self, tokens: PolicyTokens) -> TokenLoss:
        sequences, advantages = tokens.sequences, tokens.advantages
        of_response = sequences.spread(sequences.mean(tokens.log_ratio.detach()).exp())
        ratio = of_response * (tokens.logprobs - tokens.logprobs.detach()).exp()
        unclipped = -advantages * ratio
        clipped = -advantages * ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        fractions = _clip_fractions(tokens, clipped > unclipped, advantages)
        return torch.maximum(unclipped, clipped), {"actor/sequence_ratio_mean": tokens.mean(of_response), **fractions}


@dataclass(frozen=True)
class GMPO(settings.GMPOSettings):
    """Geometric-mean policy optimization: the geometric mean of a response's clipped token ratios.

        l_t  = min(log_ratio, clip_high)     where A > 0
               max(log_ratio, -clip_low)     where A <= 0
        loss = -A * exp(mean of l_t over the response)          A: mean of the response's advantages

    One outlier among n tokens moves the geometric mean by its n-th root, so the bounds on single tokens may be wide:
    they are e^-0.4 and e^0.4. Each token is clipped before the mean, and only in the direction that would raise the
    objective.
    Token means: actor/sequence_ratio_mean (the geometric mean), actor/clip_fraction_high, actor/clip_fraction_low
    (tokens whose gradient the upper or lower bound cut off).
    Source: Zhao et al. 2025, arXiv:2507.20673, whose experiments have these bounds.
    """

    def __call__(self, tokens: PolicyTokens) -> TokenLoss:
        sequences, log_ratio = tokens.sequences, tokens.log_ratio
        advantages = sequences.spread(sequences.mean(tokens.advantages))
        gains = advantages > 0
        clipped = torch.where(gains, log_ratio.clamp(max=self.clip_high), log_ratio.clamp(min=-self.clip_low))
        ratio = sequences.spread(sequences.mean(clipped).exp())
        fractions = _clip_fractions(tokens, clipped != log_ratio, advantages)
        return -advantages * ratio, {"actor/sequence_ratio_mean": tokens.mean(ratio), **fractions}


@dataclass(frozen=True)
class CISPO(settings.CISPOSettings):
    """Clipped importance-sampling policy optimization: REINFORCE with capped ratios as weights.

        loss = -sg(min(ratio, cap)) * A * log p                 sg: a constant

    PPO's clip silences a token once it has moved far enough, and rare tokens move far at once: those that begin a new
    line of thought. Here a token's gradient is never 0, only its weight is bounded.
    Token mean: actor/capped_fraction (tokens whose ratio is above the cap).
    Source: MiniMax 2025 (MiniMax-M1), arXiv:2506.13585, which has no lower bound in practice; the cap, 4 to 8
    without a difference: Khatri et al. 2025 (ScaleRL), arXiv:2510.13786.
    """

    def __call__(self, tokens: PolicyTokens) -> TokenLoss:
        ratio = tokens.log_ratio.detach().exp()
        token_loss = -ratio.clamp(max=self.cap) * tokens.advantages * tokens.logprobs
        return token_loss, {"actor/capped_fraction": tokens.mean((ratio > self.cap).float())}


@dataclass(frozen=True)
class SAPO(settings.SAPOSettings):
    """Soft adaptive policy optimization: a smooth gate in place of the clip.

        loss = -A * sigmoid(tau * (ratio - 1)) * 4 / tau        tau: tau_positive where A > 0, else tau_negative

    Its derivative by the ratio is -A * 4 g (1 - g), g the sigmoid: -A at a ratio of 1, as without a clip, and falling
    on both sides without an edge. The steeper gate for negative advantages damps gradients that raise the logits of all
    tokens except the sampled one.
    Token mean: actor/gate_mean (4 g (1 - g), the share of each token's gradient that the gate leaves).
    Source: Gao et al. 2025, arXiv:2511.20347, whose experiments have these two tau.
    """

    def __call__(self, tokens: PolicyTokens) -> TokenLoss:
        tau = torch.where(tokens.advantages > 0, self.tau_positive, self.tau_negative)
        gate = torch.sigmoid(tau * (tokens.log_ratio.exp() - 1.0))
        return -tokens.advantages * gate * 4.0 / tau, {"actor/gate_mean": tokens.mean(4.0 * gate * (1.0 - gate))}


@dataclass(frozen=True)
class DPPOTV(settings.DPPOTVSettings):
    """Divergence proximal policy optimization: a trust region by the change of a token's probability.

        loss = -M * sg(min(ratio, cap)) * A * log p             sg: a constant
        M    = 0 where D > threshold and the gradient would raise D: A > 0 and p > q, or A < 0 and p < q; else 1
        D    = |p - q|

    p and q are the new and the old probability of the sampled token; D is the divergence of the distributions "this
    token or another", a lower bound of that of the whole vocabulary. A ratio of 2 is nothing for a token of probability
    1e-4 and a lot for one of 0.4: PPO's clip holds back the first as much as the second.
    Token mean: actor/masked_fraction (tokens without a gradient).
    Source: Qi et al. 2026, arXiv:2602.04879; cap: section 5.4; thresholds: the authors' recipes. The paper's q is that
    of the sampler, as here with algorithm.old_logprobs=rollout.
    """

    def __call__(self, tokens: PolicyTokens) -> TokenLoss:
        new, old = tokens.logprobs.detach(), (tokens.logprobs - tokens.log_ratio).detach()
        return _masked_objective(tokens, (new.exp() - old.exp()).abs() > self.threshold, cap=self.cap)


@dataclass(frozen=True)
class DPPOKL(settings.DPPOKLSettings):
    """The same loss as `DPPOTV` with another distance.

        D = q log(q / p) + (1 - q) log((1 - q) / (1 - p))

    Token mean: actor/masked_fraction (tokens without a gradient). Source: arXiv:2602.04879.
    """

    def __call__(self, tokens: PolicyTokens) -> TokenLoss:
        new, old = tokens.logprobs.detach(), (tokens.logprobs - tokens.log_ratio).detach()
        other_new, other_old = (-torch.expm1(x).clamp(max=-SMALLEST) for x in (new, old))
        divergence = old.exp() * (old - new) + other_old * (other_old / other_new).log()
        return _masked_objective(tokens, divergence > self.threshold, cap=self.cap)


def _masked_objective(tokens: PolicyTokens, far: Tensor, *, cap: float) -> TokenLoss:
    """Return (loss of each token, token means); `far`, bool: tokens outside the trust region."""
    change = tokens.log_ratio.detach()
    masked = far & (change * tokens.advantages > 0)
    weight = torch.where(masked, 0.0, change.exp().clamp(max=cap))
    return -weight * tokens.advantages * tokens.logprobs, {"actor/masked_fraction": tokens.mean(masked.float())}


@dataclass(frozen=True)
class ClipCov(settings.ClipCovSettings):
    """PPO's loss without a gradient for the tokens that would reduce the entropy most.

        c    = A * (log p - mean of log p over the response)             covariance of a token, nats
        loss = that of PPO; no gradient where c >= threshold

    A step changes the entropy by minus the covariance of advantage and log-prob, which very few tokens make up. The
    paper centres both factors over a batch and takes a share of its tokens, here by lot; either would depend on which
    tokens share a micro-batch. Here log-probs are centred over their response, advantages are centred as they come, and
    a threshold takes the place of the share.
    Token means: PPO's, actor/covariance_fraction (tokens held back).
    Source: Cui et al. 2025, arXiv:2505.22617, section 4.
    """

    def __call__(self, tokens: PolicyTokens) -> TokenLoss:
        token_loss, means = PPO(self.clip_low, self.clip_high, self.dual_clip)(tokens)
        held = covariance(tokens) >= self.threshold
        means["actor/covariance_fraction"] = tokens.mean(held.float())
        return torch.where(held, token_loss.detach(), token_loss), means


@dataclass(frozen=True)
class KLCov(settings.KLCovSettings):
    """The unclipped objective with a penalty on the tokens that would reduce the entropy most, as in `ClipCov`.

        loss = -A * ratio, + coef * |log_ratio| where c >= threshold; bounded by dual_clip as PPO's

    Token mean: actor/covariance_fraction (tokens held back).
    Source: Cui et al. 2025, arXiv:2505.22617, section 4; |log_ratio|: the authors' code.
    """

    def __call__(self, tokens: PolicyTokens) -> TokenLoss:
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


@dataclass(frozen=True)
class TeacherDivergence(settings.TeacherDivergenceSettings):
    """On-policy distillation over the whole vocabulary: the divergence of the student from a teacher.

        loss = D(p, q)      D: mega_rl.parallel.divergence

    At each token of the student's own samples, with the exact gradient at its prefix; how a token changes the prefixes
    of later ones is left out. It reads no advantages. Token mean: actor/teacher_divergence, nats.
    Source: Agarwal et al. 2023 (GKD), arXiv:2306.13649, eq. 3 with only student data.
    """

    def __call__(self, tokens: PolicyTokens) -> TokenLoss:
        assert tokens.divergence is not None, "a teacher has taught"
        return tokens.divergence, {"actor/teacher_divergence": tokens.mean(tokens.divergence)}


# Called with the settings of the recipe; names and settings as in `mega_rl.config.schema.algorithms.LOSSES`.
OBJECTIVES: dict[str, Callable[..., PolicyObjective]] = {
    "ppo": PPO,
    "gspo": GSPO,
    "gmpo": GMPO,
    "cispo": CISPO,
    "sapo": SAPO,
    "dppo_tv": DPPOTV,
    "dppo_kl": DPPOKL,
    "clip_cov": ClipCov,
    "kl_cov": KLCov,
    "distillation": TeacherDivergence,
}
