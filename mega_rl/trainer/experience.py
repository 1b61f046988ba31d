"""Rows of rollouts that are what they are called, experience from them, and the mini-batches that train on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mega_rl.algorithms.advantages.base import AdvantageEstimator, AdvantageInputs
from mega_rl.algorithms.kl import RewardKL
from mega_rl.algorithms.losses.aggregation import Aggregation, loss_weights, token_and_sequence_counts
from mega_rl.algorithms.statistics import SumOverRanks
from mega_rl.data.minibatches import assign_rows, minibatch_prompt_blocks
from mega_rl.errors import RunError
from mega_rl.parallel.agreement import raise_together
from mega_rl.parallel.comm import share
from mega_rl.protocols import Ranks
from mega_rl.types import Experience, Prompt, Rewards, Rollout, TokenOutputs, row_numbers


def check_rows(rollout: Rollout, prompts: Sequence[Prompt], ranks: Ranks, *, samples: int = 0) -> None:
    """Check that a rank has each sample of its share of the prompts once, behind the tokens of its own prompt.

    prompts: the global batch, into which `rollout.prompt_index` points; ranks: the data-parallel replicas; samples:
    of each prompt, 0 for as many as its highest number says. Rows may come in any order.
    Raises RunError on all ranks; collective.
    """
    fault = next(_row_faults(rollout, prompts, own=share(len(prompts), ranks), samples=samples), None)
    raise_together(None if fault is None else RunError(f"rollout: {fault}"), ranks, error=RunError)


def _row_faults(rollout: Rollout, prompts: Sequence[Prompt], *, own: range, samples: int) -> Iterator[str]:
    keys = list(zip(rollout.prompt_index.tolist(), rollout.sample_index.tolist(), strict=True))
    samples = samples or max((sample + 1 for _, sample in keys), default=0)
    expected = Counter((prompt, sample) for prompt in own for sample in range(samples))
    if wrong := (Counter(keys) - expected) or (expected - Counter(keys)):
        prompt, sample = min(wrong)
        yield (
            f"sample {sample} of prompt {prompt} has {keys.count((prompt, sample))} rows; this rank must have one row "
            f"of each of {samples} samples of prompts {own.start} to {own.stop - 1}, and no others"
        )
    if wrong or not keys:
        return
    table = [torch.tensor(prompts[prompt].token_ids, dtype=torch.int64) for prompt in own]
    lengths, ids = torch.tensor([len(tokens) for tokens in table]), pad_sequence(table, batch_first=True)
    place = rollout.prompt_index.cpu() - own.start
    width = min(ids.size(1), rollout.tokens.size(1))
    inside = torch.arange(width) < lengths[place, None]
    differ = ((rollout.tokens.cpu()[:, :width] != ids[place, :width]) & inside).any(dim=1)
    for row in (differ | (rollout.prompt_lengths.cpu() != lengths[place])).nonzero().flatten().tolist():
        prompt, sample = keys[row]
        called = f"row {row} is called sample {sample} of prompt {prompt}, row {prompts[prompt].index} of the data"
        yield f"{called}, but its prompt has other tokens: it answers another prompt than it would be scored for"


def build_experience(
    rollout: Rollout,
    rewards: Rewards,
    *,
    old: TokenOutputs,
    ref: TokenOutputs,
    critic: TokenOutputs,
    estimator: AdvantageEstimator,
    sum_over_ranks: SumOverRanks,
    reward_kl: RewardKL | None = None,
) -> Experience:
    """Return the rollout with advantages and returns. A role that the run lacks has empty outputs.

    reward_kl: the KL penalty in token rewards; None without.

    Failed samples have no response token. So none of them trains, their rewards have no token to stand on, and every
    statistic (of a group, of the batch, of a mini-batch) is one of the samples that have an answer.
    """
    assert old.logprobs is not None
    assert rollout.failed is None or not rollout.loss_mask[rollout.failed].any(), (
        "a failed sample has tokens that train"
    )
    experience = Experience.from_rows(
        rollout.tokens,
        loss_mask=rollout.loss_mask,
        prompt_lengths=rollout.prompt_lengths,
        lengths=rollout.lengths,
        prompt_index=rollout.prompt_index,
        sample_index=rollout.sample_index,
        rollout_logprobs=rollout.rollout_logprobs,
        old_logprobs=old.logprobs,
        ref_logprobs=old.logprobs if ref.logprobs is None else ref.logprobs,
        values=torch.zeros_like(old.logprobs) if critic.values is None else critic.values,
        routing=rollout.routing if old.routing is None else old.routing,
    )
    penalty = None if reward_kl is None else reward_kl.penalty(experience.old_logprobs, experience.ref_logprobs)
    inputs = AdvantageInputs(experience, rewards.totals, penalty, sum_over_ranks, reward_parts=rewards.parts)
    experience.advantages, experience.returns = estimator(inputs)
    return experience


@dataclass(frozen=True)
class MinibatchPlan:
    """Cut of the global batch into mini-batches, the same for every layout."""

    minibatch_size: int  # prompts, over all data-parallel ranks
    epochs: int
    aggregation: Aggregation
    max_response_tokens: int
    seed: int

    def cut(self, experience: Experience, *, num_prompts: int, step: int, ranks: Ranks) -> Iterator[Experience]:
        """Yield this rank's rows of one global mini-batch after the other, balanced by tokens over `ranks`.

        Which prompts make a mini-batch depends on the seed, the step and the epoch alone. Loss weights hold the
        reciprocal of the mini-batch's global token and sequence counts, so a loss is a plain sum over tokens. Rows are
        numbered anew on the rank that trains them.
        """
        index, lengths = gather_column(experience.prompt_index, ranks), gather_column(experience.lengths, ranks)
        own = slice(*own_rows(experience.prompt_index.numel(), ranks))
        for epoch in range(self.epochs):
            for block in minibatch_prompt_blocks(num_prompts, self.minibatch_size, seed_key=(self.seed, step, epoch)):
                destinations = assign_rows(index, lengths, block=block, dp_size=ranks.size)[own]
                yield self._weigh(moved_rows(experience, destinations, ranks), num_prompts, ranks)

    def _weigh(self, minibatch: Experience, num_prompts: int, ranks: Ranks) -> Experience:
        """Set the mini-batch's loss and token weights from global counts; returns it."""
        mask, index = minibatch.loss_mask, minibatch.prompt_index
        of_prompts = torch.zeros(num_prompts, dtype=torch.float64).index_add_(0, index, mask.sum(dim=1).double())
        counts = ranks.sum(torch.cat([token_and_sequence_counts(mask), of_prompts]))
        tokens, sequences = counts[:2].tolist()
        minibatch.loss_weights = loss_weights(
            mask,
            self.aggregation,
            global_tokens=tokens,
            global_sequences=sequences,
            max_response_tokens=self.max_response_tokens,
            prompt_index=index,
            prompt_tokens=counts[2:],
        )
        minibatch.token_weights = mask.float() / max(tokens, 1.0)
        return minibatch


def moved_rows(experience: Experience, destinations: Tensor, ranks: Ranks) -> Experience:
    """Send each row to the rank that trains it, and return what this one gets, numbered anew; collective.

    destinations: [B] int64, of this rank's rows; -1 for one that no rank trains.
    """
    chosen = (destinations >= 0).nonzero().flatten()
    moved = ranks.exchange_rows(experience[chosen], destinations[chosen])  # type: ignore[index]
    moved.rows = row_numbers(moved.loss_mask)
    return moved


def own_rows(count: int, ranks: Ranks) -> tuple[int, int]:
    """Return the first and past-the-last position of this rank's `count` rows in the rank-ordered concatenation."""
    end = int(_row_ends(count, ranks)[ranks.rank])
    return end - count, end


def _row_ends(count: int, ranks: Ranks) -> Tensor:
    """Return [ranks] int64: past-the-last position of each rank's rows in the rank-ordered concatenation."""
    counts = torch.zeros(ranks.size, dtype=torch.int64)
    counts[ranks.rank] = count
    return ranks.sum(counts).cumsum(0)


def gather_column(column: Tensor, ranks: Ranks) -> Tensor:
    """Return all ranks' values of a column [B, ...] of numbers in rank order."""
    ends = _row_ends(len(column), ranks)
    whole = torch.zeros(int(ends[-1]), *column.shape[1:], dtype=column.dtype)
    stop = int(ends[ranks.rank])
    whole[stop - len(column) : stop] = column
    return ranks.sum(whole)
