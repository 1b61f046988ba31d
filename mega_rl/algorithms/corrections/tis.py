"""Importance weights that correct updates on tokens which other weights, or another engine, sampled."""

from __future__ import annotations

from torch import Tensor

from mega_rl.algorithms.kl import clamped_log_ratio


def truncated_importance_weights(old_logprobs: Tensor, rollout_logprobs: Tensor, *, cap: float) -> Tensor:
    """Weight of each token's policy loss; float32 in the shape of the inputs, without gradient.

        w = min(pi_old / pi_rollout, cap) = min(exp(old_logprob - rollout_logprob), cap)

    old_logprobs: the trainer's, before the update (the proximal policy that the ratio of the loss is taken to);
    rollout_logprobs: of the policy that sampled, whatever its age, kernels and precision. An expectation over sampled
    tokens with these weights is one over the old policy's, but for what the cap takes off: it bounds the variance that
    a few tokens of large ratio would bring, at the price of a bias. cap > 0; 1 only ever shrinks a token's loss. The
    log ratio is clamped to +-20 nats. Where the two log-probs are equal the weight is exactly 1 (for cap >= 1).
    Source: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (truncated
    importance sampling for the mismatch of engines); Fu et al. 2025 (AReaL), arXiv:2505.24298, eq. 5 (decoupled PPO).
    """
    assert cap > 0.0, f"cap={cap}: a bound of positive weights"
    return clamped_log_ratio(old_logprobs.detach(), rollout_logprobs.detach()).exp().clamp(max=cap)


def importance_metrics(
    old_logprobs: Tensor, rollout_logprobs: Tensor, *, token_weights: Tensor, cap: float
) -> dict[str, Tensor]:
    """Token means over the mini-batch, as shares of this micro-batch: scalars without gradient.

    actor/tis_weight_mean: the weights of `truncated_importance_weights`; actor/tis_truncated_fraction: tokens whose
    ratio is above the cap. `token_weights` as in `algorithms.losses.policy`; where it is 0 nothing counts.
    """
    active = token_weights > 0
    log_ratio = clamped_log_ratio(old_logprobs.detach(), rollout_logprobs.detach()).where(active, 0.0)
    ratio = log_ratio.exp()
    return {
        "actor/tis_weight_mean": (token_weights * ratio.clamp(max=cap)).sum(),
        "actor/tis_truncated_fraction": (token_weights * (ratio > cap)).sum(),
    }
