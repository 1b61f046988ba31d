"""The clipped policy-gradient loss of PPO, used by GRPO too."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mega_rl.algorithms.kl import KLEstimator, clamped_log_ratio, kl_penalty
from mega_rl.protocols import LossOutput


@dataclass(frozen=True)
class PolicyLossSettings:
    """Bounds of the ratio between new and old policy, and the weight of the entropy bonus."""

    clip_low: float  # the ratio counts from 1 - clip_low
    clip_high: float  # to 1 + clip_high
    dual_clip: float = 0.0  # largest ratio of a negative advantage, above 1; 0 for none
    entropy_coef: float = 0.0

    def __post_init__(self) -> None:
        bound = self.dual_clip
        assert bound == 0.0 or bound > 1.0, f"dual_clip={bound}: the bound is a ratio above 1, or 0 for none"


@dataclass(frozen=True)
class KLTerm:
    """The KL divergence to a reference policy as a term of the loss."""

    ref_logprobs: Tensor  # float32, in the shape of the policy's
    coef: float
    estimator: KLEstimator


def ppo_policy_loss(
    logprobs: Tensor,
    entropy: Tensor | None,
    *,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_weights: Tensor,
    token_weights: Tensor,
    settings: PolicyLossSettings,
    kl: KLTerm | None = None,
) -> LossOutput:
    """Return the policy's loss on one micro-batch, a share of the mini-batch's.

        loss = sum w * (pg - entropy_coef * entropy + kl.coef * kl)      pg: `clipped_objective`, kl: `kl_penalty`

    All tensors share one shape, packed or padded; float32. `loss_weights` w are those of algorithms.losses.aggregation;
    `token_weights` (1 / global response tokens on response tokens, else 0) also say which tokens count: whatever stands
    elsewhere, even a NaN, touches neither loss nor gradient. entropy may be None when entropy_coef is 0.

    sums, besides those of `clipped_objective`: actor/loss, actor/policy_loss and actor/kl_loss, weighted as the loss;
    token means of actor/entropy and of actor/ref_kl with a reference. maxima: actor/ratio_max. Without `entropy` the
    metric is the mean of -logprob, whose expectation over tokens that this policy samples is the entropy.
    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7; KL in the loss: Shao et al. 2024, arXiv:2402.03300, eq. 3,
    but for its gradient.
    """
    assert entropy is not None or settings.entropy_coef == 0.0, "an entropy bonus needs the entropy"
    active = token_weights > 0
    logprobs, old_logprobs, advantages = (torch.where(active, x, 0.0) for x in (logprobs, old_logprobs, advantages))
    log_ratio = clamped_log_ratio(logprobs, old_logprobs)
    token_loss, sums = clipped_objective(log_ratio, advantages, token_weights=token_weights, settings=settings)
    loss = (loss_weights * token_loss).sum()
    sums["actor/policy_loss"] = loss.detach()
    if entropy is None:
        sums["actor/entropy"] = -(token_weights * logprobs).sum().detach()
    else:
        entropy = torch.where(active, entropy, 0.0)
        sums["actor/entropy"] = (token_weights * entropy).sum().detach()
        loss = loss - settings.entropy_coef * (loss_weights * entropy).sum()
    if kl is not None:
        ref_logprobs = torch.where(active, kl.ref_logprobs, 0.0)
        divergence = kl_penalty(logprobs, ref_logprobs, log_ratio=log_ratio, estimator=kl.estimator)
        kl_loss = kl.coef * (loss_weights * divergence).sum()
        loss = loss + kl_loss
        sums["actor/kl_loss"] = kl_loss.detach()
        sums["actor/ref_kl"] = (token_weights * divergence).sum().detach()
    sums["actor/loss"] = loss.detach()
    maxima = {"actor/ratio_max": torch.where(active, log_ratio.exp(), 0.0).max().detach()}
    return LossOutput(loss=loss, sums=sums, maxima=maxima)


def clipped_objective(
    log_ratio: Tensor, advantages: Tensor, *, token_weights: Tensor, settings: PolicyLossSettings
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (loss pg of each token, token means over the mini-batch); all tensors share one shape, float32.

        ratio = exp(log_ratio)            log_ratio = logprob - old_logprob, clamped to +-20 nats
        pg    = max(-A * ratio, -A * clip(ratio, 1 - clip_low, 1 + clip_high))
        pg    = min(pg, -A * dual_clip)   where A < 0 and dual_clip > 0

    The token means: actor/ppo_kl (k3 estimate of KL(old || new), nats), actor/ratio_mean, actor/clip_fraction_high,
    actor/clip_fraction_low (tokens whose gradient the upper or lower bound cut off), actor/clip_fraction_dual with
    dual_clip.
    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7; dual clip: Ye et al. 2020, arXiv:1912.09729, eq. 5; separate
    bounds: Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 10.
    """

    def token_mean(x: Tensor) -> Tensor:
        return (token_weights * x).sum().detach()

    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    token_loss = torch.maximum(unclipped, clipped)
    cut = clipped > unclipped
    sums = {
        "actor/clip_fraction_high": token_mean((cut & (advantages > 0)).float()),
        "actor/clip_fraction_low": token_mean((cut & (advantages < 0)).float()),
        "actor/ratio_mean": token_mean(ratio),
        "actor/ppo_kl": token_mean(torch.expm1(log_ratio) - log_ratio),
    }
    if settings.dual_clip > 0.0:
        bound = -advantages * settings.dual_clip
        beyond = (advantages < 0) & (token_loss > bound)
        token_loss = torch.where(beyond, bound, token_loss)
        sums["actor/clip_fraction_dual"] = token_mean(beyond.float())
    return token_loss, sums
