"""Corrections: weights of token losses for tokens that other weights, or another engine, sampled.

Recipes choose by `name`, as `algorithm.correction=tis`. Called with tokens a correction returns (weight of each token's
policy loss, at least 0; token means by name). A weight of 0 leaves the token out; what the loss is divided by stays the
mini-batch's. Config reads this file without torch, so a correction imports it when it is called.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mega_rl.config.setting import Kind, by_name, setting

if TYPE_CHECKING:
    from torch import Tensor

    from mega_rl.algorithms.losses import SampledTokens, TokenLoss


@dataclass(frozen=True)
class NoCorrection(Kind):
    """No correction: every token counts fully."""

    name = "none"


@dataclass(frozen=True)
class AutoCorrection(Kind):
    """The correction that suits the run, which the log names."""

    name = "auto"


@dataclass(frozen=True)
class TIS(Kind):
    """Truncated importance sampling.

        token:     w_t = min(pi_old / pi_rollout, cap)                  of each token
        sequence:  w   = min(prod_t pi_old / pi_rollout, cap)           of all tokens of a response

    The cap bounds the variance that a few large ratios would bring, at the price of a bias. Weights of tokens leave out
    how likely the tokens before were; weights of sequences do not, and vary with the response's length.
    Token mean: actor/tis_truncated_fraction (tokens whose ratio is above the cap).
    Source: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (truncated
    importance sampling for the mismatch of engines); Fu et al. 2025 (AReaL), arXiv:2505.24298, eq. 5 (decoupled PPO);
    sequences: Liu et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference
    Mismatch".
    """

    name = "tis"

    level: str = setting(
        "token", "Ratio of each token, or of a response's probabilities.", choices=("token", "sequence")
    )
    cap: float = setting(2.0, "Each token's policy loss times min(ratio of pi_old to pi_rollout, cap).", above=0.0)

    def __call__(self, tokens: SampledTokens) -> TokenLoss:
        log_ratio = tokens.log_ratio
        if self.level == "sequence":
            log_ratio = tokens.sequences.spread(tokens.sequences.sum(log_ratio))
        ratio = tokens.ratio(log_ratio)
        return ratio.clamp(max=self.cap), {"actor/tis_truncated_fraction": tokens.mean((ratio > self.cap).float())}


@dataclass(frozen=True)
class Band(Kind):
    """Settings of corrections by a band of ratios."""

    low: float
    high: float

    def problems(self) -> Iterator[str]:
        if not self.low <= 1.0 <= self.high:
            yield f"low={self.low:g}, high={self.high:g}: legal: low at most 1, high at least 1"


@dataclass(frozen=True)
class IcePop(Band):
    """Importance weights of tokens inside a band; tokens outside do not train.

        r_t = pi_old / pi_rollout
        w_t = r_t   where low <= r_t <= high, else 0

    A token that the two policies see so differently is not scaled but left out: its gradient is noise of the mismatch.
    Source: Ling Team 2025, arXiv:2510.18855, section on IcePop.
    """

    name = "icepop"

    low: float = setting(0.5, "Tokens of a smaller ratio of pi_old to pi_rollout do not train.", min=0.0)
    high: float = setting(5.0, "Tokens of a larger ratio do not train.", min=0.0)

    def __call__(self, tokens: SampledTokens) -> TokenLoss:
        import torch

        ratio = tokens.log_ratio.exp()
        return torch.where((ratio >= self.low) & (ratio <= self.high), ratio, 0.0), {}


@dataclass(frozen=True)
class GeometricRejection(Band):
    """Responses whose mean ratio of a token is outside a band do not train.

        r   = exp(mean_t log(pi_old / pi_rollout))
        w_t = 1     on all tokens of a response where low <= r <= high, else 0

    A single token may have led all later ones astray. The geometric mean does not depend on the length.
    Source: Liu et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference
    Mismatch".
    """

    name = "geometric_rejection"

    low: float = setting(0.99, "Responses of a smaller geometric mean of pi_old over pi_rollout are rejected.", min=0.0)
    high: float = setting(1.01, "Responses of a larger geometric mean are rejected.", min=0.0)

    def __call__(self, tokens: SampledTokens) -> TokenLoss:
        return _inside(tokens, tokens.sequences.mean(tokens.log_ratio).exp(), low=self.low, high=self.high), {}


@dataclass(frozen=True)
class SequenceRejection(Band):
    """Responses whose ratio of probabilities is outside a band do not train; few long ones pass.

        r = exp(sum_t log(pi_old / pi_rollout))

    Source: as of `GeometricRejection`.
    """

    name = "sequence_rejection"

    low: float = setting(0.5, "Responses of a smaller ratio of pi_old to pi_rollout are rejected.", min=0.0)
    high: float = setting(2.0, "Responses of a larger ratio are rejected.", min=0.0)

    def __call__(self, tokens: SampledTokens) -> TokenLoss:
        return _inside(tokens, tokens.sequences.sum(tokens.log_ratio).exp(), low=self.low, high=self.high), {}


def _inside(tokens: SampledTokens, ratios: Tensor, *, low: float, high: float) -> Tensor:
    """Return 1 on tokens of responses whose ratio, in [n], is within the bounds, else 0."""
    return tokens.sequences.spread(((ratios >= low) & (ratios <= high)).float())


@dataclass(frozen=True)
class OPSM(Kind):
    """Responses of negative advantage that the policy has moved away from do not train.

        w_t = 0   on all tokens of a response with A_t < 0 and mean_t log(pi_rollout / pi) > delta, else 1

    pi is the policy now: pushing down a response that it would hardly give any more only disturbs it.
    Source: DeepSeek-AI 2025 (DeepSeek-V3.2), arXiv:2512.02556, section 3.1.
    """

    name = "opsm"

    delta: float = setting(
        0.1, "Largest mean of log(pi_rollout / pi) of a response that trains.", unit="nats per token", above=0.0
    )

    def __call__(self, tokens: SampledTokens) -> TokenLoss:
        import torch

        distance = tokens.sequences.mean(tokens.log_distance)
        is_far = tokens.sequences.spread(distance) > self.delta
        return torch.where(is_far & (tokens.advantages < 0), 0.0, torch.ones_like(tokens.advantages)), {}


CORRECTIONS = by_name(TIS, IcePop, GeometricRejection, SequenceRejection, OPSM)
CHOICES = by_name(AutoCorrection, NoCorrection) | CORRECTIONS
