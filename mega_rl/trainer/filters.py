"""Pure filters of a step's rows: prompts and rows that train, and punishment of long responses.

Dynamic sampling and overlong responses: Yu et al. 2025 (DAPO), arXiv:2503.14476, sections 3.2 and 3.4.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mega_rl.data.minibatches import assign_rows
from mega_rl.protocols import Ranks
from mega_rl.trainer.rows import Samples, answered, gather_column, moved_rows, own_rows, scored_rows, select
from mega_rl.types import Experience, Metrics, RewardParts, Rewards, Rollout, row_numbers

# Numbers of each token that an experience has before mini-batches are cut; all are 0 off the loss mask.
PER_TOKEN = ("rollout_logprobs", "old_logprobs", "ref_logprobs", "values", "advantages", "returns")


def spread_of(samples: Samples, ranks: Ranks, *, by_parts: bool) -> Tensor:
    """Return [P] bool: whether the rewards of each prompt's samples differ; equal on all ranks; collective.

    Samples that failed or have no reward do not count, so a group of only such samples has no spread. by_parts: a
    difference in a component with a weight counts, even if the totals are equal.
    """
    rollout, rewards = samples.rollout, samples.rewards
    rows = scored_rows(rollout, rewards).nonzero().flatten()
    numbers = gather_column(rollout.prompt_index[rows], ranks)
    compared = rewards.totals[:, None]
    if by_parts and rewards.parts is not None:
        weighted = [column for column, weight in enumerate(rewards.parts.weights) if weight]
        compared = rewards.parts.values[:, weighted]
    spread = torch.zeros(len(samples.prompts), dtype=torch.bool)
    for column in gather_column(compared[rows], ranks).unbind(dim=1):
        spread |= has_spread(numbers, column, count=len(spread))
    return spread


def has_spread(prompt_index: Tensor, rewards: Tensor, *, count: int) -> Tensor:
    """Return [count] bool: whether a prompt has samples with different rewards; prompt_index [N] int64, rewards [N]."""
    known = ~rewards.isnan()  # a component that the prompt's data source lacks is NaN
    prompt_index, rewards = prompt_index[known], rewards[known]
    lowest = torch.full((count,), torch.inf).scatter_reduce(0, prompt_index, rewards, "amin")
    highest = torch.full((count,), -torch.inf).scatter_reduce(0, prompt_index, rewards, "amax")
    return lowest < highest


def choose(spread: Tensor, count: int) -> Tensor:
    """Return the first `count` prompts with a spread, filled with the first without; ascending."""
    with_spread, without = spread.nonzero().flatten(), (~spread).nonzero().flatten()
    return torch.cat([with_spread, without])[:count].sort().values


def with_prompts(samples: Samples, chosen: Tensor) -> Samples:
    """Return the rows of the chosen prompts, under all prompts as before; chosen: [n] int64."""
    return samples.select(torch.isin(samples.rollout.prompt_index, chosen).nonzero().flatten())


def share_out(samples: Samples, chosen: Tensor, ranks: Ranks) -> Samples:
    """Return this rank's part of the chosen prompts, numbered from 0 and in order; collective."""
    rows, rewards = samples.rollout, samples.rewards
    rows.prompt_index = torch.searchsorted(chosen, rows.prompt_index)
    count = 1 + int(ranks.max(rows.sample_index.max() if len(rows.sample_index) else torch.tensor(0)))
    keys = gather_column(rows.prompt_index * count + rows.sample_index, ranks)
    columns = gather_column(rewards.columns(), ranks)[keys.argsort()]
    own = ranks.exchange_rows(rows, rows.prompt_index * ranks.size // len(chosen))
    own_keys = own.prompt_index * count + own.sample_index
    width = int(own.lengths.max()) if len(own.lengths) else own.tokens.size(1)
    own = select(own, own_keys.argsort(), width=width)
    rewards = rewards.with_columns(columns[torch.searchsorted(keys.sort().values, own_keys.sort().values)])
    return Samples([samples.prompts[number] for number in chosen.tolist()], own, rewards)


def leave_unscored_out(rollout: Rollout, rewards: Rewards) -> tuple[Rollout, Rewards]:
    """Return both with rows without a reward marked as failed: off the loss mask, reward 0.

    Without a token on the loss mask a row is in no group, statistic or denominator, as if it had not been drawn.
    """
    left_out = rewards.totals.isnan()
    if not left_out.any():
        return rollout, rewards
    scored = scored_rows(rollout, rewards)
    fields: dict[str, Tensor] = {name: getattr(rollout, name) for name in Rollout.__annotations__}
    mask = rollout.loss_mask & scored[:, None]
    fields |= {"failed": ~scored, "loss_mask": mask, "rollout_logprobs": rollout.rollout_logprobs * mask}
    if rollout.token_versions is not None:
        fields["token_versions"] = rollout.token_versions * mask
    parts = rewards.parts
    if parts is not None:
        parts = replace(parts, values=parts.values.masked_fill(left_out[:, None], 0.0))
    return Rollout.from_rows(**fields), replace(rewards, totals=rewards.totals.masked_fill(left_out, 0.0), parts=parts)


@dataclass(frozen=True)
class Overlong:
    """Rules for responses that reach the length limit; by default there are none."""

    max_response_tokens: int = 0
    filter: bool = False  # responses that length cut off do not train
    buffer_tokens: int = 0  # 0: no punishment
    penalty: float = 1.0  # at the limit

    def shape(self, rollout: Rollout, rewards: Rewards, ranks: Ranks) -> tuple[Rewards, Metrics]:
        """Return rewards with the punishment, and the mean punishment and the share of filtered samples; collective."""
        punishment = torch.zeros_like(rewards.totals)
        if self.buffer_tokens:
            tokens = rollout.lengths - rollout.prompt_lengths  # the limit counts a tool's tokens, too
            part = soft_punishment(tokens, limit=self.max_response_tokens, buffer=self.buffer_tokens)
            punishment = self.penalty * part
            parts = rewards.parts
            if parts is not None:
                values = torch.cat([parts.values, part[:, None]], dim=1)
                parts = RewardParts((*parts.names, "overlong"), (*parts.weights, self.penalty), values)
            rewards = replace(rewards, totals=rewards.totals + punishment, parts=parts)
        has_answer = answered(rollout)
        columns = (has_answer, punishment, has_answer & ~rollout.finished)
        count, punished, truncated = ranks.sum(torch.stack([column.double().sum() for column in columns])).tolist()
        metrics: Metrics = {}
        if self.buffer_tokens:
            metrics["reward/overlong_punishment_mean"] = punished / max(count, 1.0)
        if self.filter:
            metrics["rollout/filtered_fraction"] = truncated / max(count, 1.0)
        return rewards, metrics


def soft_punishment(response_tokens: Tensor, *, limit: int, buffer: int) -> Tensor:
    """Return [B] float32, eq. 13: 0 to `limit - buffer` tokens, linear to -1 at `limit`."""
    return ((limit - buffer - response_tokens).double() / buffer).clamp(-1.0, 0.0).float()


def leave_truncated_out(experience: Experience, rollout: Rollout) -> Experience:
    """Take the tokens of responses that length cut off from the loss mask; return the experience."""
    experience.loss_mask = experience.loss_mask & rollout.finished[:, None]
    experience.rows = row_numbers(experience.loss_mask)
    for name in PER_TOKEN:
        setattr(experience, name, getattr(experience, name) * experience.loss_mask)
    return experience


def rows_with_advantages(minibatch: Experience, ranks: Ranks) -> tuple[Experience, float]:
    """Return this rank's rows with an advantage other than 0, and the share left out; collective.

    The gradient of every loss that is a multiple of the advantage is the same without these rows, to rounding. Rows are
    balanced anew. If no row has an advantage, the shortest row that trains stays, with a gradient of 0.
    """
    own = ((minibatch.advantages != 0) & minibatch.loss_mask).any(dim=1)
    trains = minibatch.loss_mask.any(dim=1)
    columns = (own.long(), trains.long(), minibatch.lengths)
    chosen, trains, lengths = (gather_column(column, ranks) for column in columns)
    total = len(chosen)
    if not chosen.any():
        chosen[torch.where(trains > 0, lengths, lengths.max() + 1).argmin()] = 1
    destinations = assign_rows(chosen, lengths, block=[1], dp_size=ranks.size)
    left = moved_rows(minibatch, destinations[slice(*own_rows(len(own), ranks))], ranks)
    share = float(ranks.sum(left.token_weights.double().sum()))
    if share > 0.0:  # a mini-batch may have no token that trains
        left.token_weights = (left.token_weights / share).float()
    return left, 1.0 - int(chosen.sum()) / total
