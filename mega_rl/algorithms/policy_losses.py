"""Policy losses, each with its settings; `LOSSES` lists them.

Recipes choose by `name`, as `algorithm.loss=gspo`. Config reads this file without torch, so a loss imports it when
it is called.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mega_rl.config.setting import Kind, by_name, setting

if TYPE_CHECKING:
    from torch import Tensor

    from mega_rl.algorithms.losses import PolicyTokens, TokenLoss


@dataclass(frozen=True)
class LossKind(Kind):
    """A policy loss: its fields are its settings, its class variables say what it needs of a run.

    Called with the tokens of a micro-batch it returns a `TokenLoss`.
    """

    needs_response_mean: ClassVar[bool] = False  # has one number for a response: a mean over tokens, then responses
    needs_response_advantages: ClassVar[bool] = False  # reads only the mean of a response's advantages
    needs_updates: ClassVar[bool] = False  # several updates of a batch: in the first one nothing is left of it
    needs_teacher: ClassVar[bool] = False  # divergences from the reference over the whole vocabulary


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
    """Unclipped objective with a penalty on tokens that would reduce entropy most, as in `ClipCov`.

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


SMALLEST = 1e-7  # floor of 1 - p before its logarithm: half a rounding of 1 in float32


@dataclass(frozen=True, kw_only=True)
class Drifting(LossKind):
    """A loss that may hold the policy near what sampled."""

    drift_coef: float = setting(0.0, "Weight of (log p - log q)^2 / 2 in the loss, q of what sampled.", min=0.0)


@dataclass(frozen=True)
class CISPO(Drifting):
    """Clipped importance-sampling policy optimization: REINFORCE with capped ratios as weights.

        loss = -sg(min(ratio, cap)) * A * log p                 sg: a constant

    A token's gradient is never 0, only its weight is bounded, while PPO's clip silences rare tokens at once.
    Token mean: actor/capped_fraction (tokens whose ratio is above the cap).
    Source: MiniMax 2025 (MiniMax-M1), arXiv:2506.13585, which has no lower bound in practice; the cap, 4 to 8
    without a difference: Khatri et al. 2025 (ScaleRL), arXiv:2510.13786.
    """

    name = "cispo"

    cap: float = setting(5.0, "Largest ratio that weighs a token's gradient.", min=1.0)

    def __call__(self, tokens: PolicyTokens) -> TokenLoss:
        ratio = tokens.log_ratio.detach().exp()
        token_loss = -ratio.clamp(max=self.cap) * tokens.advantages * tokens.logprobs
        return token_loss, {"actor/capped_fraction": tokens.mean((ratio > self.cap).float())}


@dataclass(frozen=True)
class DPPOTV(Drifting):
    """Divergence proximal policy optimization: a trust region by the change of a token's probability.

        loss = -M * sg(min(ratio, cap)) * A * log p             sg: a constant
        M    = 0 where D > threshold and the gradient would raise D: A > 0 and p > q, or A < 0 and p < q; else 1
        D    = |p - q|

    p and q are the new and the old probability of the sampled token; D is a lower bound of the divergence of the whole
    vocabulary. A ratio of 2 is nothing for a token of probability 1e-4 and a lot for one of 0.4.
    Token mean: actor/masked_fraction (tokens without a gradient).
    Source: Qi et al. 2026, arXiv:2602.04879; cap: section 5.4; thresholds: the authors' recipes. The paper's q is that
    of the sampler, as here with algorithm.old_logprobs=rollout.
    """

    name = "dppo_tv"

    threshold: float = setting(0.15, "No token's gradient moves its probability further than this.", above=0.0, max=1.0)
    cap: float = setting(20.0, "Largest ratio that weighs a token's gradient.", min=1.0)

    def __call__(self, tokens: PolicyTokens) -> TokenLoss:
        new, old = tokens.logprobs.detach(), (tokens.logprobs - tokens.log_ratio).detach()
        return _masked_objective(tokens, (new.exp() - old.exp()).abs() > self.threshold, cap=self.cap)


@dataclass(frozen=True)
class DPPOKL(Drifting):
    """The same loss as `DPPOTV` with another distance.

        D = q log(q / p) + (1 - q) log((1 - q) / (1 - p))

    Token mean: actor/masked_fraction (tokens without a gradient). Source: arXiv:2602.04879.
    """

    name = "dppo_kl"

    threshold: float = setting(0.05, "No token's gradient moves it further than this.", unit="nats", above=0.0)
    cap: float = setting(20.0, "Largest ratio that weighs a token's gradient.", min=1.0)

    def __call__(self, tokens: PolicyTokens) -> TokenLoss:
        import torch

        new, old = tokens.logprobs.detach(), (tokens.logprobs - tokens.log_ratio).detach()
        other_new, other_old = (-torch.expm1(x).clamp(max=-SMALLEST) for x in (new, old))
        divergence = old.exp() * (old - new) + other_old * (other_old / other_new).log()
        return _masked_objective(tokens, divergence > self.threshold, cap=self.cap)


def _masked_objective(tokens: PolicyTokens, far: Tensor, *, cap: float) -> TokenLoss:
    """Return (loss of each token, token means); `far`, bool: tokens outside the trust region."""
    import torch

    change = tokens.log_ratio.detach()
    masked = far & (change * tokens.advantages > 0)
    weight = torch.where(masked, 0.0, change.exp().clamp(max=cap))
    return -weight * tokens.advantages * tokens.logprobs, {"actor/masked_fraction": tokens.mean(masked.float())}


@dataclass(frozen=True)
class SAPO(LossKind):
    """Soft adaptive policy optimization: a smooth gate in place of the clip.

        loss = -A * sigmoid(tau * (ratio - 1)) * 4 / tau        tau: tau_positive where A > 0, else tau_negative

    Its derivative by the ratio is -A * 4 g (1 - g), g the sigmoid: -A at a ratio of 1, falling on both sides.
    Token mean: actor/gate_mean (4 g (1 - g), the share of each token's gradient that the gate leaves).
    Source: Gao et al. 2025, arXiv:2511.20347, whose experiments have these two tau.
    """

    name = "sapo"

    tau_positive: float = setting(1.0, "Steepness of the gate for positive advantages.", above=0.0)
    tau_negative: float = setting(
        1.05, "Steepness for negative advantages; larger, since their gradients spread over many tokens.", above=0.0
    )

    def __call__(self, tokens: PolicyTokens) -> TokenLoss:
        import torch

        tau = torch.where(tokens.advantages > 0, self.tau_positive, self.tau_negative)
        gate = torch.sigmoid(tau * (tokens.log_ratio.exp() - 1.0))
        return -tokens.advantages * gate * 4.0 / tau, {"actor/gate_mean": tokens.mean(4.0 * gate * (1.0 - gate))}


@dataclass(frozen=True)
class TeacherDivergence(LossKind):
    """On-policy distillation over the whole vocabulary: the divergence of the student from a teacher.

        loss = D(p, q)      D: mega_rl.parallel.divergence

    At each token of the student's own samples, with the exact gradient at its prefix. Token mean:
    actor/teacher_divergence, nats.
    Source: Agarwal et al. 2023 (GKD), arXiv:2306.13649, eq. 3 with only student data.
    """

    name = "distillation"
    needs_teacher = True

    beta: float = setting(
        1.0,
        "Divergence of student p and teacher q: 1 is KL(p || q), 0 is KL(q || p), between them the generalised "
        "Jensen-Shannon divergence.",
        min=0.0,
        max=1.0,
    )

    def __call__(self, tokens: PolicyTokens) -> TokenLoss:
        assert tokens.divergence is not None, "a teacher has taught"
        return tokens.divergence, {"actor/teacher_divergence": tokens.mean(tokens.divergence)}


LOSSES = by_name(PPO, GSPO, GMPO, ClipCov, KLCov, CISPO, DPPOTV, DPPOKL, SAPO, TeacherDivergence)
