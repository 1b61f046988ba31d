"""Policy and critic losses on a micro-batch's tokens, and their aggregation to one number.

Every aggregation is a weighted sum: loss = sum over all ranks and micro-batches of weight * token_loss. The
denominators are those of the whole mini-batch, counted before the backward, so neither the loss nor its gradient
depends on how the rows are spread over ranks or cut into micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mega_rl.algorithms.kl import LOG_RATIO_LIMIT, KLEstimator, clamped_log_ratio, kl_penalty
from mega_rl.algorithms.statistics import Sequences, SumOverRanks, global_moments, histogram_where, identity
from mega_rl.protocols import LossOutput
from mega_rl.types import over_trajectory


@dataclass(frozen=True)
class PolicyTokens:
    """A micro-batch's tokens, packed or padded: float32 tensors of one shape, 0 where `token_weights` is 0."""

    logprobs: Tensor  # the policy's, with gradient
    log_ratio: Tensor  # to the policy before the update, clamped to +-20 nats, with gradient
    advantages: Tensor
    token_weights: Tensor  # 1 / response tokens of the global mini-batch; 0 on tokens that do not count
    loss_weights: Tensor  # share of the token's loss in the mini-batch's; algorithms.losses
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
        """Return tokens with these fields; values of tokens that do not count, even NaN, become 0."""
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
    rollout_logprobs: Tensor  # the sampling policy's, whatever its age, kernels and precision
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
        """Return log(pi_rollout / pi), clamped to +-20 nats; 0 on tokens that do not count."""
        return clamped_log_ratio(self.rollout_logprobs, self.logprobs).where(self.token_weights > 0, 0.0)

    def mean(self, x: Tensor) -> Tensor:
        """Return this micro-batch's share of the mean of x over the mini-batch's tokens."""
        return (self.token_weights * x).sum()


Correction = Callable[[SampledTokens], TokenLoss]  # one of `corrections`, or a user's function or class


@dataclass(frozen=True)
class Denominators:
    """Numbers of the global mini-batch, at least 1 each, that a token's loss is divided by."""

    tokens: float  # N: response tokens
    sequences: float  # M: trajectories that have response tokens
    max_response_tokens: int  # L
    of_prompts: Tensor | None = None  # [B, 1] float64: P prompts with tokens * n_prompt of the row's prompt


# (response tokens of each row's trajectory [B, 1] float64, at least 1; denominators) -> weight of the row's tokens
# [B, 1] float64
Aggregation = Callable[[Tensor, Denominators], Tensor]

# Weights, n_row response tokens of the row's trajectory. token-mean: every token counts the same, Yu et al. 2025
# (DAPO), arXiv:2503.14476, section 3.3. seq-mean-token-mean: every sequence does, Shao et al. 2024 (GRPO),
# arXiv:2402.03300, eq. 3. seq-mean-token-sum: a sequence counts by its length; -norm: over a constant length, Liu et
# al. 2025 (Dr. GRPO), arXiv:2503.20783, section 3.2. prompt-mean: every prompt counts the same, Khatri et al.
# 2025, arXiv:2510.13786.
AGGREGATIONS: dict[str, Aggregation] = {
    "token-mean": lambda n_row, over: torch.full_like(n_row, 1.0 / over.tokens),
    "seq-mean-token-mean": lambda n_row, over: 1.0 / (over.sequences * n_row),
    "seq-mean-token-sum": lambda n_row, over: torch.full_like(n_row, 1.0 / over.sequences),
    "seq-mean-token-sum-norm": lambda n_row, over: torch.full_like(
        n_row, 1.0 / (over.sequences * over.max_response_tokens)
    ),
    "prompt-mean": lambda n_row, over: 1.0 / _given(over.of_prompts),
}


def _given(of_prompts: Tensor | None) -> Tensor:
    assert of_prompts is not None, "a mean over prompts needs the tokens of each prompt"
    return of_prompts


def token_and_sequence_counts(mask: Tensor, branch: Tensor | None = None) -> Tensor:
    """Return [2] float64: this rank's numbers of response tokens and of trajectories that have any."""
    per_row = over_trajectory(mask.sum(dim=1), branch)
    first = per_row > 0 if branch is None else (per_row > 0) & (branch == 0)
    return torch.stack([mask.sum(), first.sum()]).double()


def loss_weights(
    mask: Tensor,
    aggregation: Aggregation,
    *,
    global_tokens: float,
    global_sequences: float,
    max_response_tokens: int,
    branch: Tensor | None = None,
    prompt_index: Tensor | None = None,
    prompt_tokens: Tensor | None = None,
) -> Tensor:
    """Return [B, S] float32: each token's weight in the mini-batch's loss, 0 off the mask.

    mask [B, S] bool; this rank's rows, which must hold whole trajectories; branch: as in `Rollout`. A row without
    response tokens weighs 0.
    global_tokens and global_sequences are the sums of `token_and_sequence_counts` over the whole mini-batch. A mean
    over prompts needs prompt_index [B] int64, and prompt_tokens [prompts] float64 of the whole mini-batch.
    """
    row_tokens = over_trajectory(mask.sum(dim=1), branch)[:, None].double().clamp(min=1.0)
    over = Denominators(max(global_tokens, 1.0), max(global_sequences, 1.0), max_response_tokens)
    if prompt_tokens is not None:
        over = replace(over, of_prompts=((prompt_tokens > 0).sum() * prompt_tokens[prompt_index, None]).clamp(min=1.0))
    return torch.where(mask, aggregation(row_tokens, over), 0.0).to(torch.float32)


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

    logprobs, loss_weights: one shape, float32; the weights are those of algorithms.losses, so the sum over
    micro-batches and ranks is the global mean. Tokens of weight 0 touch neither loss nor gradient.
    """
    loss = -(loss_weights * logprobs.where(loss_weights != 0, 0.0)).sum()
    return LossOutput(loss=loss, sums={"sft/loss": loss})


def clipped_value_loss(
    values: Tensor,
    *,
    old_values: Tensor,
    returns: Tensor,
    token_weights: Tensor,
    value_clip: float,
) -> LossOutput:
    """Return the critic's loss on one micro-batch, a share of the mini-batch's.

        near = old + clip(V - old, -value_clip, value_clip)
        loss = sum w * max((V - R)^2, (near - R)^2) / 2

    w is `token_weights`, 1 / (tokens of the global mini-batch): the mean over tokens, whatever aggregation the policy's
    loss has, whose scale would otherwise be the critic's too (that of a sum over a response is hundreds of times
    larger, and its gradient always clipped). All tensors share one shape, packed or padded; float32. value_clip 0 turns
    the clipping off. Values where `token_weights` is 0 touch neither loss nor gradient.

    sums: critic/loss; critic/clip_fraction (tokens whose gradient the clip cut off),
    critic/value_mean, critic/return_mean, token means. maxima: critic/error_max, the largest |V - R|.
    Source: Schulman et al. 2016, arXiv:1506.02438, section 5; the clip: OpenAI baselines, ppo2.
    """
    active = token_weights > 0
    values = torch.where(active, values, 0.0)
    old_values = torch.where(active, old_values, 0.0)
    returns = torch.where(active, returns, 0.0)

    error = (values - returns).square()
    clip_fraction = torch.zeros((), dtype=torch.float32, device=values.device)
    if value_clip > 0.0:
        near = old_values + (values - old_values).clamp(-value_clip, value_clip)
        near_error = (near - returns).square()
        # The distance is tested too: inside the clip the two errors may differ by a rounding.
        cut = (near_error > error) & ((values - old_values).abs() > value_clip)
        clip_fraction = (token_weights * cut).sum()
        token_loss = 0.5 * torch.maximum(error, near_error)
    else:
        token_loss = 0.5 * error
    loss = (token_weights * token_loss).sum()
    sums = {
        "critic/loss": loss.detach(),
        "critic/clip_fraction": clip_fraction.detach(),
        "critic/value_mean": (token_weights * values).sum().detach(),
        "critic/return_mean": (token_weights * returns).sum().detach(),
    }
    return LossOutput(loss=loss, sums=sums, maxima={"critic/error_max": error.max().sqrt().detach()})


def explained_variance(
    values: Tensor, returns: Tensor, mask: Tensor, *, sum_over_ranks: SumOverRanks = identity
) -> Tensor:
    """Return 1 - Var[returns - values] / Var[returns] over the global batch, a float64 scalar.

    values, returns [B, S] float32; mask [B, S] bool. 1 is a perfect critic, 0 one no better than a constant. Where all
    returns are equal (variance 0) the ratio has no meaning and the result is 0.
    """
    _, error = global_moments(returns.double() - values.double(), mask, sum_over_ranks=sum_over_ranks)
    _, target = global_moments(returns, mask, sum_over_ranks=sum_over_ranks)
    has_spread = target > 0
    ratio = error / torch.where(has_spread, target, 1.0)
    return torch.where(has_spread, 1.0 - ratio, 0.0)
