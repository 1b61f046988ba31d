"""Corrections: weights of token losses for tokens that other weights, or another engine, sampled.

`CORRECTIONS` has them by the name that a recipe chooses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mega_rl.algorithms.kl import LOG_RATIO_LIMIT, clamped_log_ratio
from mega_rl.algorithms.sequences import Sequences
from mega_rl.config.schema import algorithms as settings

Weights = tuple[Tensor, dict[str, Tensor]]


@dataclass(frozen=True)
class SampledTokens:
    """Tokens of a micro-batch with their two log-probs; one shape, float32, without gradient."""

    logprobs: Tensor  # the trainer's now
    old_logprobs: Tensor  # the trainer's, before the update: the policy that the ratio of the loss is taken to
    rollout_logprobs: Tensor  # of the policy that sampled, whatever its age, kernels and precision
    advantages: Tensor
    token_weights: Tensor  # 1 / response tokens of the global mini-batch; 0 on tokens that do not count
    sequences: Sequences  # sums over whole responses; collective under context parallelism

    @property
    def log_ratio(self) -> Tensor:
        """Return log(pi_old / pi_rollout), clamped to +-20 nats; 0 on tokens that do not count."""
        return self.of_active(clamped_log_ratio(self.old_logprobs, self.rollout_logprobs))

    def of_active(self, x: Tensor) -> Tensor:
        """Return x on tokens that count, 0 elsewhere."""
        return x.where(self.token_weights > 0, 0.0)

    def mean(self, x: Tensor) -> Tensor:
        """Return this micro-batch's share of the mean of x over the mini-batch's tokens."""
        return (self.token_weights * x).sum()


class Correction(Protocol):
    """A correction; its settings as of `config.schema.algorithms.CorrectionSettings`."""

    def __call__(self, tokens: SampledTokens, /) -> Weights:
        """Return (weight of each token's policy loss, at least 0; token means by name: "actor/...").

        A weight of 0 leaves the token out; what the loss is divided by stays the mini-batch's. The mean of the weights
        and the share of zeros are measured for every correction.
        """
        ...


@dataclass(frozen=True)
class TIS(settings.TISSettings):
    """Truncated importance sampling.

        token:     w_t = min(pi_old / pi_rollout, cap)                  of each token
        sequence:  w   = min(prod_t pi_old / pi_rollout, cap)           of all tokens of a response

    An expectation over sampled tokens with these weights is one over the old policy's, except for what the cap takes
    off: it bounds the variance that a few large ratios would bring, at the price of a bias. Weights of tokens leave out
    how likely the tokens before were; weights of sequences do not, and vary with the response's length. If the
    log-probs are equal the weight is exactly 1 (for cap >= 1).
    Token mean: actor/tis_truncated_fraction (tokens whose ratio is above the cap).
    Source: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (truncated
    importance sampling for the mismatch of engines); Fu et al. 2025 (AReaL), arXiv:2505.24298, eq. 5 (decoupled PPO);
    sequences: Liu et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference
    Mismatch".
    """

    def __call__(self, tokens: SampledTokens) -> Weights:
        log_ratio = tokens.log_ratio
        if self.level == "sequence":
            log_ratio = tokens.sequences.spread(tokens.sequences.sum(log_ratio))
        ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        return ratio.clamp(max=self.cap), {"actor/tis_truncated_fraction": tokens.mean((ratio > self.cap).float())}


@dataclass(frozen=True)
class IcePop(settings.IcePopSettings):
    """Importance weights of tokens inside a band, and none of those outside.

        r_t = pi_old / pi_rollout
        w_t = r_t   where low <= r_t <= high, else 0

    A token that the two policies see so differently is not scaled but left out: its gradient is noise of the mismatch.
    Source: Ling Team 2025, arXiv:2510.18855, section on IcePop.
    """

    def __call__(self, tokens: SampledTokens) -> Weights:
        ratio = tokens.log_ratio.exp()
        return torch.where((ratio >= self.low) & (ratio <= self.high), ratio, 0.0), {}


@dataclass(frozen=True)
class GeometricRejection(settings.GeometricRejectionSettings):
    """Rejection of whole responses by their mean log ratio.

        r   = exp(mean_t log(pi_old / pi_rollout))
        w_t = 1     on all tokens of a response where low <= r <= high, else 0

    A response far off is left out as a whole, since a single token of it may have led all later ones astray. The
    geometric mean does not depend on the length.
    Source: Liu et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference
    Mismatch".
    """

    def __call__(self, tokens: SampledTokens) -> Weights:
        return _inside(tokens, tokens.sequences.mean(tokens.log_ratio).exp(), low=self.low, high=self.high), {}


@dataclass(frozen=True)
class SequenceRejection(settings.SequenceRejectionSettings):
    """Rejection, as in `GeometricRejection`, by the ratio of a response's probabilities, which few long ones pass.

        r = exp(sum_t log(pi_old / pi_rollout))

    Source: as of `GeometricRejection`.
    """

    def __call__(self, tokens: SampledTokens) -> Weights:
        return _inside(tokens, tokens.sequences.sum(tokens.log_ratio).exp(), low=self.low, high=self.high), {}


def _inside(tokens: SampledTokens, ratios: Tensor, *, low: float, high: float) -> Tensor:
    """Return 1 on tokens of responses whose ratio, in [n], is within the bounds, else 0."""
    return tokens.sequences.spread(((ratios >= low) & (ratios <= high)).float())


@dataclass(frozen=True)
class OPSM(settings.OPSMSettings):
    """Off-policy sequence masking: bad responses that the policy has moved away from are left out.

        w_t = 0   on all tokens of a response with A_t < 0 and mean_t log(pi_rollout / pi) > delta, else 1

    pi is the policy now, so the distance holds staleness, mismatch and the updates of this step. A model learns from
    its own mistakes; pushing down a response that it would hardly give any more only disturbs it. Good responses stay.
    Source: DeepSeek-AI 2025 (DeepSeek-V3.2), arXiv:2512.02556, section 3.1.
    """

    def __call__(self, tokens: SampledTokens) -> Weights:
        distance = tokens.sequences.mean(tokens.of_active(clamped_log_ratio(tokens.rollout_logprobs, tokens.logprobs)))
        is_far = tokens.sequences.spread(distance) > self.delta
        return torch.where(is_far & (tokens.advantages < 0), 0.0, torch.ones_like(tokens.advantages)), {}


# Called with the settings of the recipe; `mega_rl.config.schema.algorithms.CORRECTIONS` has the same names, and "none".
CORRECTIONS: dict[str, Callable[..., Correction]] = {
    "tis": TIS,
    "icepop": IcePop,
    "geometric_rejection": GeometricRejection,
    "sequence_rejection": SequenceRejection,
    "opsm": OPSM,
}
