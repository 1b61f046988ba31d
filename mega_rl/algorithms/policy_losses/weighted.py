"""Policy losses that weigh or gate the gradient of a token, and the divergence from a teacher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mega_rl.algorithms.policy_losses import LossKind
from mega_rl.config.setting import setting

if TYPE_CHECKING:
    from torch import Tensor

    from mega_rl.algorithms.losses import PolicyTokens, TokenLoss

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
