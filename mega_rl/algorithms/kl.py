"""Estimates of the KL divergence to the reference policy, and controllers of the penalty's coefficient."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mega_rl.errors import RunError

LOG_RATIO_LIMIT = 20.0  # nats; exp(20) = 4.9e8 is finite in float32, and so is its square
K3_LIMIT = 10.0  # nats, of one token's estimate
WEIGHT_LIMIT = 10.0  # ratio to the policy that sampled; the clipped objective's bounds end long before


def clamped_log_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return log(p / q) of two log-probs, clamped to +-20 nats so that exp is finite.

    Beyond the limit the gradient is 0: such a token carries no usable ratio.
    """
    return (numerator - denominator).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


# (log-probs of the policy p, of the reference q; one shape) -> estimate of KL(p || q) in nats for each token, which the
# policy sampled. Source of all three: J. Schulman, "Approximating KL divergence" (2020),
# http://joschu.net/blog/kl-approx.html.
KLEstimator = Callable[[Tensor, Tensor], Tensor]


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return log(p / q): unbiased, of high variance, may be negative."""
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return log(p / q)^2 / 2: biased, of low variance, never negative."""
    return 0.5 * (logprobs - ref_logprobs).square()


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return q/p - 1 - log(q/p), at most 10: low variance, never negative, unbiased where uncut.

    Without the bound one token whose probability collapsed is the mean. Beyond it the derivative is 0, so a loss takes
    its gradient from `kl_penalty`.
    """
    log_ratio = clamped_log_ratio(ref_logprobs, logprobs)
    estimate = torch.expm1(log_ratio) - log_ratio
    return estimate.clamp(max=K3_LIMIT)


KL_ESTIMATORS: dict[str, KLEstimator] = {"k1": k1, "k2": k2, "k3": k3}


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, *, log_ratio: Tensor, estimator: KLEstimator) -> Tensor:
    """Return each token's KL to the reference as a loss term with the divergence's own gradient.

        value     w * estimator(p, q)
        gradient  w * log(p / q) * grad log p       w = min(p / p_old, 10), a constant; log(p / q) within +-20 nats

    All tensors share one shape; log_ratio is log(p / p_old), and p_old sampled the tokens. Their mean gradient is that
    of KL(p || q) at their prefixes, so k2 and k3 differ only in value. Derivatives of bare estimators are others: of
    k1 it is 0 on average, of k3 it is that of KL(q || p).
    Source: Tang & Munos 2025, arXiv:2506.09477; docs/decisions.md has the numbers.
    """
    weight = log_ratio.detach().exp().clamp(max=WEIGHT_LIMIT)
    value = estimator(logprobs, ref_logprobs).detach()
    pull = clamped_log_ratio(logprobs, ref_logprobs).detach()
    return weight * (value + pull * (logprobs - logprobs.detach()))


def kl_metrics(logprobs: Tensor, ref_logprobs: Tensor, *, token_weights: Tensor) -> dict[str, Tensor]:
    """Return the token means kl/ref (k3) and kl/ref_k1 in nats, this micro-batch's shares, without gradient.

    All tensors share one shape; `token_weights` as in `algorithms.losses`, and where it is 0 nothing counts.
    """
    active = token_weights > 0
    logprobs, ref_logprobs = (torch.where(active, x.detach(), 0.0) for x in (logprobs, ref_logprobs))
    estimates = {"kl/ref": k3(logprobs, ref_logprobs), "kl/ref_k1": k1(logprobs, ref_logprobs)}
    return {name: (token_weights * estimate).sum() for name, estimate in estimates.items()}


@dataclass
class KLController:
    """Coefficient of the KL penalty: constant, or steered so that the observed KL stays near `target`.

        error = clip(kl / target - 1, -0.2, 0.2)
        value = value * (1 + error * min(num_sequences / horizon, 1))

    target in nats per token, horizon in sequences. The cap at 1 keeps the coefficient of a large batch positive.
    Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.2.
    """

    value: float
    target: float | None = None  # None: constant
    horizon: int = 1

    def penalty(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        """Return coefficient times k1 of each token, shaped like the log-probs, to subtract from its reward."""
        return self.value * k1(logprobs, ref_logprobs)

    def update(self, kl: float, num_sequences: int) -> None:
        """Take the mean KL (nats per token) of a step's `num_sequences` sequences into account.

        Raises RunError for a KL that is not finite, which would be the coefficient of every later step.
        """
        if self.target is None:
            return
        if not math.isfinite(kl):
            raise RunError(
                f"kl/ref={kl}: the adaptive KL controller needs a finite KL, so log-probs of the policy or of the "
                "reference are not finite; resume from an earlier checkpoint with a lower optim.lr, and check the "
                "reference's weights"
            )
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * min(num_sequences / self.horizon, 1.0)

    def state(self) -> dict[str, float]:
        """Return the numbers that a checkpoint must hold; empty for a constant, taken from the config."""
        return {} if self.target is None else {"value": self.value}

    def restore(self, state: Mapping[str, float]) -> None:
        """Continue from what `state` returned."""
        self.value = state.get("value", self.value) if self.target is not None else self.value
