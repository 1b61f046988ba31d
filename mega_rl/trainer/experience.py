"""From rollouts to the mini-batches that train."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mega_rl.algorithms.advantages import gae, grpo, token_rewards
from mega_rl.algorithms.aggregation import loss_weights
from mega_rl.algorithms.kl import KLController, kl_penalty
from mega_rl.algorithms.statistics import whiten
from mega_rl.data.minibatches import assign_rows, minibatch_prompt_blocks
from mega_rl.protocols import Ranks
from mega_rl.types import Experience, Rollout, TokenOutputs

SumOverRanks = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class GAEAdvantages:
    """Generalized advantage estimation over a critic's values, with the KL penalty in the token rewards if asked."""

    gamma: float
    gae_lambda: float
    whiten: bool
    kl: KLController | None  # KL in the reward; None without
    kl_estimator: str

    def __call__(self, experience: Experience, rewards: Tensor, sum_over_ranks: SumOverRanks) -> tuple[Tensor, Tensor]:
        """(advantages, returns), [B, S] each."""
        mask = experience.loss_mask
        penalty = None
        if self.kl is not None:
            penalty = kl_penalty(experience.old_logprobs, experience.ref_logprobs, estimator=self.kl_estimator)
        scores = token_rewards(rewards, mask, penalty, kl_coef=0.0 if self.kl is None else self.kl.value)
        advantages, returns = gae(scores, experience.values, mask, gamma=self.gamma, lam=self.gae_lambda)
        if self.whiten:
            advantages = whiten(advantages, mask, sum_over_ranks=sum_over_ranks)
        return advantages, returns


@dataclass(frozen=True)
class GRPOAdvantages:
    """Rewards normalised within the samples of one prompt; needs no critic."""

    std_normalization: bool

    def __call__(self, experience: Experience, rewards: Tensor, sum_over_ranks: SumOverRanks) -> tuple[Tensor, Tensor]:
        """(advantages, zeros), [B, S] each."""
        advantages = grpo(
            rewards, experience.prompt_index, experience.loss_mask, std_normalization=self.std_normalization
        )
        return advantages, torch.zeros_like(advantages)


AdvantageEstimator = Callable[[Experience, Tensor, SumOverRanks], tuple[Tensor, Tensor]]


def build_experience(
    rollout: Rollout,
    rewards: Tensor,
    *,
    old: TokenOutputs,
    ref: TokenOutputs,
    critic: TokenOutputs,
    estimator: AdvantageEstimator,
    sum_over_ranks: SumOverRanks,
) -> Experience:
    """The rollout with advantages and returns; `rewards` is [B]. A role the run lacks says nothing of its tokens.

    Failed samples have no response token. So none of them trains, their rewards have no token to stand on, and every
    statistic (of a group, of the batch, of a mini-batch) is one of the samples that have an answer.
    """
    assert old.logprobs is not None
    assert rollout.failed is None or not rollout.loss_mask[rollout.failed].any(), (
        "a failed sample has tokens that train"
    )
    blank = torch.zeros_like(old.logprobs)
    experience = Experience(
        tokens=rollout.tokens,
        loss_mask=rollout.loss_mask,
        prompt_lengths=rollout.prompt_lengths,
        lengths=rollout.lengths,
        prompt_index=rollout.prompt_index,
        sample_index=rollout.sample_index,
        rollout_logprobs=rollout.rollout_logprobs,
        old_logprobs=old.logprobs,
        ref_logprobs=old.logprobs if ref.logprobs is None else ref.logprobs,
        values=blank if critic.values is None else critic.values,
        advantages=blank,
        returns=blank,
        loss_weights=blank,
        token_weights=blank,
        routing=rollout.routing if old.routing is None else old.routing,
        batch_size=[rollout.tokens.size(0)],  # type: ignore[call-arg]
    )
    experience.advantages, experience.returns = estimator(experience, rewards, sum_over_ranks)
    return experience


@dataclass(frozen=True)
class MinibatchPlan:
    """How the global batch is cut into mini-batches; the same cut for every layout."""

    minibatch_size: int  # prompts, over all data-parallel ranks
    epochs: int
    aggregation: str
    max_response_tokens: int
    seed: int

    def cut(self, experience: Experience, *, num_prompts: int, step: int, ranks: Ranks) -> Iterator[Experience]:
        """This rank's rows of one global mini-batch after the other, balanced by tokens over `ranks`.

        Which prompts make a mini-batch depends on the seed, the step and the epoch alone. Loss weights hold the
        reciprocal of the mini-batch's global token and sequence counts, so a loss is a plain sum over tokens.
        """
        index, lengths = gather_column(experience.prompt_index, ranks), gather_column(experience.lengths, ranks)
        own = slice(*own_rows(experience.prompt_index.numel(), ranks))
        for epoch in range(self.epochs):
            for block in minibatch_prompt_blocks(num_prompts, self.minibatch_size, seed_key=(self.seed, step, epoch)):
                destinations = assign_rows(index, lengths, block=block, dp_size=ranks.size)[own]
                chosen = (destinations >= 0).nonzero().flatten()
                minibatch = ranks.exchange_rows(experience[chosen], destinations[chosen])  # type: ignore[index]
                yield self._weigh(minibatch, ranks)

    def _weigh(self, minibatch: Experience, ranks: Ranks) -> Experience:
        """The mini-batch with its loss and token weights set from global counts."""
        mask = minibatch.loss_mask
        counts = torch.stack([mask.sum(), mask.any(dim=1).sum()]).double()
        tokens, sequences = ranks.sum(counts).tolist()
        minibatch.loss_weights = loss_weights(
            mask,
            self.aggregation,
            global_tokens=tokens,
            global_sequences=sequences,
            max_response_tokens=self.max_response_tokens,
        )
        minibatch.token_weights = mask.float() / max(tokens, 1.0)
        return minibatch


def own_rows(count: int, ranks: Ranks) -> tuple[int, int]:
    """First and past-the-last position of this rank's `count` rows in the rank-ordered concatenation."""
    counts = torch.zeros(ranks.size, dtype=torch.int64)
    counts[ranks.rank] = count
    ends = ranks.sum(counts).cumsum(0)
    return int(ends[ranks.rank]) - count, int(ends[ranks.rank])


def gather_column(column: Tensor, ranks: Ranks) -> Tensor:
    """All ranks' values of a [B] int64 column in rank order."""
    start, stop = own_rows(column.numel(), ranks)
    total = int(ranks.sum(torch.tensor(column.numel())))
    whole = torch.zeros(total, dtype=column.dtype)
    whole[start:stop] = column
    return ranks.sum(whole)
