"""Inputs of policy losses and corrections: log-probs and advantages of the tokens of a micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mega_rl.algorithms.kl import LOG_RATIO_LIMIT, clamped_log_ratio
from mega_rl.algorithms.sequences import Sequences


@dataclass(frozen=True)
class PolicyTokens:
    """Tokens of a micro-batch, packed or padded; all tensors of one shape, float32, 0 where `token_weights` is 0."""

    logprobs: Tensor  # of the policy, with gradient
    log_ratio: Tensor  # to the policy before the update, clamped to +-20 nats, with gradient
    advantages: Tensor
    token_weights: Tensor  # 1 / response tokens of the global mini-batch; 0 on tokens that do not count
    loss_weights: Tensor  # share of the token's loss in the mini-batch's; algorithms.losses.aggregation
    sequences: Sequences  # sums over whole responses; collective under context parallelism
    divergence: Tensor | None = None  # from the teacher of a loss that needs one, nats, with gradient

    @classmethod
    def of(
        cls,
        logprobs: Tensor,
        *,
        old_logprobs: Tensor,
        advantages: Tensor,
        token_weights: Tensor,
        loss_weights: Tensor,
        sequences: Sequences,
        divergence: Tensor | None = None,
    ) -> PolicyTokens:
        """Return the tokens of these fields; values of tokens that do not count, even a NaN, become 0."""
        active = token_weights > 0
        logprobs, old_logprobs, advantages = (torch.where(active, x, 0.0) for x in (logprobs, old_logprobs, advantages))
        log_ratio = clamped_log_ratio(logprobs, old_logprobs)
        divergence = None if divergence is None else torch.where(active, divergence, 0.0)
        return cls(logprobs, log_ratio, advantages, token_weights, loss_weights, sequences, divergence)

    @property
    def active(self) -> Tensor:
        """Return which tokens count; bool."""
        return self.token_weights > 0

    def mean(self, x: Tensor) -> Tensor:
        """Return this micro-batch's share of the mean of x over the mini-batch's tokens; without gradient."""
        return (self.token_weights * x).sum().detach()


# (loss of each token, to be minimised, before `loss_weights`, or its weight; token means by name: "actor/...")
TokenLoss = tuple[Tensor, dict[str, Tensor]]
PolicyObjective = Callable[[PolicyTokens], TokenLoss]  # a `LossKind`, or a user's function or class


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
        return clamped_log_ratio(self.old_logprobs, self.rollout_logprobs).where(self.token_weights > 0, 0.0)

    @staticmethod
    def ratio(log_ratio: Tensor) -> Tensor:
        """Return the exponential of log ratios, of responses too, clamped to +-20 nats."""
        return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()

    @property
    def log_distance(self) -> Tensor:
        """Return log(pi_rollout / pi) of the policy now, clamped to +-20 nats; 0 on tokens that do not count."""
        return clamped_log_ratio(self.rollout_logprobs, self.logprobs).where(self.token_weights > 0, 0.0)

    def mean(self, x: Tensor) -> Tensor:
        """Return this micro-batch's share of the mean of x over the mini-batch's tokens."""
        return (self.token_weights * x).sum()


Correction = Callable[[SampledTokens], TokenLoss]  # a `CorrectionKind`, or a user's function or class
