"""The clipped policy-gradient loss of PPO, used by GRPO too."""

from __future__ import annotations

import torch
from torch import Tensor

from mega_rl.algorithms.kl import clamped_log_ratio, kl_penalty
from mega_rl.protocols import LossOutput


def ppo_policy_loss(
    logprobs: Tensor,
    entropy: Tensor | None,
    *,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_weights: Tensor,
    token_weights: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
    entropy_coef: float = 0.0,
    ref_logprobs: Tensor | None = None,
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
) -> LossOutput:
    """The policy's loss on one micro-batch, a share of the mini-batch's.

        ratio = exp(logprob - old_logprob)
        pg    = max(-A * ratio, -A * clip(ratio, 1 - clip_low, 1 + clip_high))
        pg    = min(pg, -A * dual_clip)   where A < 0 and dual_clip > 0
        loss  = sum w * (pg - entropy_coef * entropy + kl_coef * kl(policy, reference))

    All tensors share one shape, packed or padded; float32. `loss_weights` w are those of algorithms.aggregation;
    `token_weights` (1 / global response tokens on response tokens, else 0) also say which tokens count: whatever stands
    elsewhere, even a NaN, touches neither loss nor gradient. The log ratio is clamped to +-20 nats before the
    exponential. The KL term is there when `ref_logprobs` is given. entropy may be None when entropy_coef is 0.

    sums, all token means over the mini-batch except the first two and `actor/kl_loss`, which are weighted as the loss:
    actor/loss, actor/policy_loss, actor/ppo_kl (k3 estimate of KL(old || new), nats), actor/ratio_mean,
    actor/clip_fraction_high, actor/clip_fraction_low (tokens whose gradient the upper or lower bound cut off),
    actor/clip_fraction_dual with dual_clip, actor/entropy with entropy, actor/kl_loss and actor/ref_kl with a
    reference. maxima: actor/ratio_max.
    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7; dual clip: Ye et al. 2020, arXiv:1912.09729, eq. 5; separate
    bounds: Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 10; KL in the loss: Shao et al. 2024, arXiv:2402.03300, eq. 3.
    """
    assert dual_clip == 0.0 or dual_clip > 1.0, f"dual_clip={dual_clip}: the bound is a ratio above 1, or 0 for none"
    assert entropy is not None or entropy_coef == 0.0, "an entropy bonus needs the entropy"
    active = token_weights > 0
    logprobs = torch.where(active, logprobs, 0.0)
    old_logprobs = torch.where(active, old_logprobs, 0.0)
    advantages = torch.where(active, advantages, 0.0)

    log_ratio = clamped_log_ratio(logprobs, old_logprobs)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    token_loss = torch.maximum(unclipped, clipped)
    cut = clipped > unclipped

    def token_mean(x: Tensor) -> Tensor:
        return (token_weights * x).sum().detach()

    sums = {
        "actor/clip_fraction_high": token_mean((cut & (advantages > 0)).float()),
        "actor/clip_fraction_low": token_mean((cut & (advantages < 0)).float()),
        "actor/ratio_mean": token_mean(ratio),
        "actor/ppo_kl": token_mean(torch.expm1(log_ratio) - log_ratio),
    }
    if dual_clip > 0.0:
        bound = -advantages * dual_clip
        beyond = (advantages < 0) & (token_loss > bound)
        token_loss = torch.where(beyond, bound, token_loss)
        sums["actor/clip_fraction_dual"] = token_mean(beyond.float())

    loss = (loss_weights * token_loss).sum()
    sums["actor/policy_loss"] = loss.detach()
    if entropy is not None:
        entropy = torch.where(active, entropy, 0.0)
        sums["actor/entropy"] = token_mean(entropy)
        if entropy_coef > 0.0:
            loss = loss - entropy_coef * (loss_weights * entropy).sum()
    if ref_logprobs is not None:
        kl = kl_penalty(logprobs, torch.where(active, ref_logprobs, 0.0), estimator=kl_estimator)
        kl_loss = kl_coef * (loss_weights * kl).sum()
        loss = loss + kl_loss
        sums["actor/kl_loss"] = kl_loss.detach()
        sums["actor/ref_kl"] = token_mean(kl)
    sums["actor/loss"] = loss.detach()
    maxima = {"actor/ratio_max": torch.where(active, ratio, 0.0).max().detach()}
    return LossOutput(loss=loss, sums=sums, maxima=maxima)
