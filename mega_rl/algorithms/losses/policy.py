"""The loss of a policy (an objective of advantages, an entropy bonus, a KL term) and maximum likelihood."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mega_rl.algorithms.distribution import histogram_where
from mega_rl.algorithms.kl import KLEstimator, clamped_log_ratio, kl_penalty
from mega_rl.algorithms.losses.tokens import PolicyObjective, PolicyTokens
from mega_rl.protocols import LossOutput


@dataclass(frozen=True)
class KLTerm:
    """The KL divergence to a reference policy as a term of the loss."""

    ref_logprobs: Tensor  # float32, in the shape of the policy's
    coef: float
    estimator: KLEstimator


def policy_loss(
    tokens: PolicyTokens,
    entropy: Tensor | None,
    *,
    objective: PolicyObjective,
    correction: Tensor | None = None,
    entropy_coef: float = 0.0,
    kl: KLTerm | None = None,
    rollout_logprobs: Tensor | None = None,
    drift_coef: float = 0.0,
) -> LossOutput:
    """Return the policy's loss on one micro-batch, a share of the mini-batch's.

        loss = sum w * (c * objective - entropy_coef * entropy + kl.coef * kl + drift_coef * (log p - log q)^2 / 2)

    kl: `kl_penalty`. w are `tokens.loss_weights`. c is `correction`, 1 without; only the objective has it. log q are
    `rollout_logprobs`, None without this term. All tensors share one shape, packed or padded; float32. Whatever
    stands where a token does not count touches neither loss nor gradient. entropy may be None when entropy_coef is 0.

    sums, besides the objective's: actor/loss, actor/policy_loss and actor/kl_loss, weighted as the loss; token means of
    actor/entropy, actor/ratio_mean, actor/ppo_kl (k3 estimate of KL(old || new), nats), actor/ref_kl with a reference,
    actor/drift with drift_coef. maxima: actor/ratio_max; minima: actor/ratio_min; log_histograms: actor/ratio. Without
    `entropy` the metric is the mean of -logprob, whose expectation over tokens that this policy samples is the entropy.
    Source: KL in the loss: Shao et al. 2024, arXiv:2402.03300, eq. 3, but for its gradient.
    """
    assert entropy is not None or entropy_coef == 0.0, "an entropy bonus needs the entropy"
    active, weights, log_ratio = tokens.active, tokens.loss_weights, tokens.log_ratio
    token_loss, sums = objective(tokens)
    if correction is not None:
        token_loss = torch.where(active, correction, 0.0) * token_loss
    loss = (weights * token_loss).sum()
    sums["actor/policy_loss"] = loss.detach()
    sums["actor/ratio_mean"] = tokens.mean(log_ratio.exp())
    sums["actor/ppo_kl"] = tokens.mean(torch.expm1(log_ratio) - log_ratio)
    if entropy is None:
        sums["actor/entropy"] = tokens.mean(-tokens.logprobs)
    else:
        entropy = torch.where(active, entropy, 0.0)
        sums["actor/entropy"] = tokens.mean(entropy)
        loss = loss - entropy_coef * (weights * entropy).sum()
    if kl is not None:
        ref_logprobs = torch.where(active, kl.ref_logprobs, 0.0)
        divergence = kl_penalty(tokens.logprobs, ref_logprobs, log_ratio=log_ratio, estimator=kl.estimator)
        kl_loss = kl.coef * (weights * divergence).sum()
        loss = loss + kl_loss
        sums["actor/kl_loss"] = kl_loss.detach()
        sums["actor/ref_kl"] = tokens.mean(divergence)
    if rollout_logprobs is not None:
        drift = clamped_log_ratio(tokens.logprobs, torch.where(active, rollout_logprobs, 0.0)).square() / 2
        loss = loss + drift_coef * (weights * drift).sum()
        sums["actor/drift"] = tokens.mean(drift)
    sums["actor/loss"] = loss.detach()
    ratio = log_ratio.detach().exp()
    maxima = {"actor/ratio_max": torch.where(active, ratio, 0.0).max()}
    minima = {"actor/ratio_min": torch.where(active, ratio, torch.inf).min()}
    histograms = {"actor/ratio": histogram_where(log_ratio.detach(), active)}
    return LossOutput(loss=loss, sums=sums, maxima=maxima, minima=minima, log_histograms=histograms)


def nll_loss(logprobs: Tensor, *, loss_weights: Tensor) -> LossOutput:
    """Return the loss of maximum likelihood on given responses, `-sum(w * logprob)`; reports "sft/loss".

    logprobs, loss_weights: one shape, float32; the weights are those of algorithms.losses.aggregation, so the sum over
    micro-batches and ranks is the global mean. Tokens of weight 0 touch neither loss nor gradient.
    """
    loss = -(loss_weights * logprobs.where(loss_weights != 0, 0.0)).sum()
    return LossOutput(loss=loss, sums={"sft/loss": loss})
