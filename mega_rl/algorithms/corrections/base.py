"""Corrections: weights of token losses for what sampled the tokens, other weights or another engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from mega_rl.algorithms.kl import clamped_log_ratio
from mega_rl.algorithms.sequences import Sequences


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

    def __call__(self, tokens: SampledTokens, /) -> tuple[Tensor, dict[str, Tensor]]:
        """Return (weight of each token's policy loss, at least 0; token means by name: "actor/...").

        A weight of 0 leaves the token out; what the loss is divided by stays the mini-batch's. The mean of the weights
        and the share of zeros are measured for every correction.
        """
        ...
