"""Rows of batches: check, choose and join them, move them between ranks, and punish long responses.

Dynamic sampling and overlong responses: Yu et al. 2025 (DAPO), arXiv:2503.14476, sections 3.2 and 3.4.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from mega_rl.algorithms.inputs import turn_ends
from mega_rl.config.schema.rollout import OverlongConfig
from mega_rl.errors import RunError
from mega_rl.parallel.agreement import raise_together
from mega_rl.parallel.comm import padded, share
from mega_rl.protocols import Ranks
from mega_rl.types import PER_TOKEN, Experience, Metrics, Prompt, RewardParts, Rewards, Rollout, row_numbers

_BRANCH_BITS = 16  # room for a row's number within its trajectory

# (rollout, row) -> the response as rewards read it, and the same with what others wrote between the policy's turns.
ReadResponse = Callable[[Rollout, int], tuple[str, str]]


class Samples(NamedTuple):
    """Scored samples of a step, as this data-parallel replica has them."""

    prompts: Sequence[Prompt]  # the global batch, into which `rollout.prompt_index` points
    rollout: Rollout
    rewards: Rewards  # one for each row
    tickets: Tensor  # [P] int64, number of each prompt's draw since the run began

    def select(self, rows: Tensor) -> Samples:
        """Return the rows with these numbers, in their order; rows: [n] int64."""
        return self._replace(rollout=select(self.rollout, rows), rewards=self.rewards[rows])

    def only(self, chosen: Tensor) -> Samples:
        """Return the prompts with these numbers and their rows, numbered anew in this order; chosen: [P'] int64."""
        numbers = torch.full((len(self.prompts),), -1).index_put((chosen,), torch.arange(len(chosen)))
        kept = self.select((numbers[self.rollout.prompt_index] >= 0).nonzero().flatten())
        kept.rollout.prompt_index = numbers[kept.rollout.prompt_index]
        return kept._replace(prompts=[self.prompts[one] for one in chosen.tolist()], tickets=self.tickets[chosen])

    def join(self, other: Samples) -> Samples:
        """Return the rows and prompts of both, padded to one width; `other` numbers prompts from 0.

        A component of the rewards that the rows of one side lack is NaN there, or 0 if none of them has been scored.
        Where failures are known for one side, the rows of the other count as answered.
        """
        theirs = select(other.rollout, torch.arange(len(other.rollout.lengths)))
        theirs.prompt_index = theirs.prompt_index + len(self.prompts)
        rollouts = (self.rollout, theirs)
        for rollout in rollouts:
            if any(one.failed is not None for one in rollouts):
                rollout.failed = ~answered(rollout)
            if rollout.branch is None and any(one.branch is not None for one in rollouts):
                rollout.branch = torch.zeros_like(rollout.lengths)
        width = max(rollout.tokens.size(1) for rollout in rollouts)
        columns = [columns_of(rollout) for rollout in rollouts]
        fields = {name: torch.cat([padded(one[name], width) for one in columns]) for name in columns[0]}
        known = other.rewards if other.rewards.parts is not None and other.rewards.parts.names else self.rewards
        names = () if known.parts is None else known.parts.names
        values = []
        for one in (self.rewards, other.rewards):
            own = () if one.parts is None else one.parts.names
            values.append(with_parts(one.columns(), own, names, first=1, missing=torch.nan if own else 0.0))
        rewards = known.with_columns(torch.cat(values))
        tickets = torch.cat([self.tickets, other.tickets])
        return Samples([*self.prompts, *other.prompts], Rollout.from_rows(**fields), rewards, tickets)


class Dropped(NamedTuple):
    """A group that was drawn and that no step trains; equal on all ranks."""

    ticket: int
    reason: str  # "equal", "surplus", "expired", "failed"; or `REDRAWN`
    tokens: float  # mean of its samples' response tokens; not a number without an answer
    reward: float  # mean of its samples; not a number without an answer


def group_means(samples: Samples, ranks: Ranks) -> Tensor:
    """Return [P, 2] float64, response tokens and reward of each prompt's mean scored sample; collective."""
    rollout, scored = samples.rollout, scored_rows(samples.rollout, samples.rewards)
    first = scored & first_rows(rollout)
    rows = torch.stack([first, scored * rollout.loss_mask.sum(1), first * samples.rewards.totals.nan_to_num()], dim=1)
    sums = torch.zeros(len(samples.prompts), 3, dtype=torch.float64)
    sums = ranks.sum(sums.index_add(0, rollout.prompt_index, rows.double()))
    return sums[:, 1:] / sums[:, :1]


def with_parts(table: Tensor, own: Sequence[str], names: Sequence[str], *, first: int, missing: float) -> Tensor:
    """Return [n, first + K], columns of `names` after `first` others; own: the table's names."""
    more = table.new_full((len(table), len(names)), missing)
    for place, name in enumerate(own):
        more[:, names.index(name)] = table[:, first + place]
    return torch.cat([table[:, :first], more], dim=1)


def columns_of(rollout: Rollout) -> dict[str, Tensor]:
    """Return the fields of a rollout by name, without the optional fields that it lacks."""
    columns = {name: getattr(rollout, name) for name in Rollout.__annotations__}
    return {name: column for name, column in columns.items() if column is not None}


def select(rollout: Rollout, rows: Tensor, *, width: int | None = None) -> Rollout:
    """Return some rows in this order, cut to `width` tokens; rows: [n] int64."""
    columns = {name: column[rows] for name, column in columns_of(rollout).items()}
    return Rollout.from_rows(**{n: c if c.dim() == 1 else c[:, :width] for n, c in columns.items()})


def answered(rollout: Rollout) -> Tensor:
    """Return [B] bool: rows whose sample has not failed."""
    return torch.ones_like(rollout.lengths, dtype=torch.bool) if rollout.failed is None else ~rollout.failed


def first_rows(rollout: Rollout) -> Tensor:
    """Return [B] bool: the first row of each trajectory."""
    return torch.ones_like(rollout.lengths, dtype=torch.bool) if rollout.branch is None else rollout.branch == 0


def scored_rows(rollout: Rollout, rewards: Rewards) -> Tensor:
    """Return [B] bool: rows that have an answer and a reward."""
    return answered(rollout) & ~rewards.totals.isnan().to(rollout.tokens.device)


def token_versions(rollout: Rollout) -> Tensor:
    """Return [B, S] int64, version of the weights that sampled each token; undefined off the mask."""
    if rollout.token_versions is not None:
        return rollout.token_versions
    return rollout.weight_version[:, None].expand_as(rollout.tokens)


def kept_tokens(rollout: Rollout) -> Tensor:
    """Return [B, S] bool, tokens whose log-probs no version's weights give; undefined off the mask."""
    return torch.zeros_like(rollout.loss_mask) if rollout.kept is None else rollout.kept


def check_rows(
    rollout: Rollout, prompts: Sequence[Prompt], ranks: Ranks, *, samples: int = 0, own: Sequence[int] | None = None
) -> None:
    """Check that each sample is there once, and begins with its prompt.

    samples: number for each prompt, 0 for as many as the highest sample number says. own: numbers of the prompts that
    are this rank's; None: its share. Raises RunError on all ranks.
    """
    own = share(len(prompts), ranks) if own is None else own
    fault = _row_fault(rollout, prompts, own=own, samples=samples)
    raise_together(RunError(f"rollout: {fault}") if fault else None, ranks, error=RunError)


def _row_fault(rollout: Rollout, prompts: Sequence[Prompt], *, own: Sequence[int], samples: int) -> str:
    keys = list(zip(rollout.prompt_index.tolist(), rollout.sample_index.tolist(), strict=True))
    branches = [0] * len(keys) if rollout.branch is None else rollout.branch.tolist()
    first = [key for key, branch in zip(keys, branches, strict=True) if branch == 0]
    samples = samples or max((sample + 1 for _, sample in keys), default=0)
    expected = Counter((prompt, sample) for prompt in own for sample in range(samples))
    if wrong := (Counter(first) - expected) or (expected - Counter(first)):
        prompt, sample = min(wrong)
        return (
            f"sample {sample} of prompt {prompt} has {first.count((prompt, sample))} rows; this rank must have one row "
            f"of each of {samples} samples of prompts {min(own, default=0)} to {max(own, default=0)}, and no others"
        )
    for row, (prompt, sample) in enumerate(keys):
        if branches[row]:  # its tokens before the first turn may be others than the prompt's
            if row == 0 or keys[row - 1] != (prompt, sample) or branches[row] != branches[row - 1] + 1:
                return f"row {row} is not next to the row before it of sample {sample} of prompt {prompt}"
            continue
        own_ids = tuple(rollout.tokens[row, : int(rollout.prompt_lengths[row])].tolist())
        # An agent's program may open a conversation of its own, but not another prompt's.
        is_foreign = rollout.branch is None or any(own_ids == one.token_ids for one in prompts)
        if own_ids != prompts[prompt].token_ids and is_foreign:
            called = f"row {row} is called sample {sample} of prompt {prompt}, row {prompts[prompt].index} of the data"
            return f"{called}, but its prompt has other tokens: it answers another prompt than it would be scored for"
    return ""


def moved_rows(experience: Experience, destinations: Tensor, ranks: Ranks) -> Experience:
    """Send each row to the rank that trains it; return the rows received, numbered anew; collective."""
    chosen = (destinations >= 0).nonzero().flatten()
    moved = ranks.exchange_rows(experience[chosen], destinations[chosen])  # type: ignore[index]
    moved.rows = row_numbers(moved.loss_mask, moved.branch)
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


def share_out(samples: Samples, ranks: Ranks) -> Samples:
    """Return this rank's part of the prompts, in order; collective."""
    rows, rewards = samples.rollout, samples.rewards
    none = torch.zeros(1, dtype=torch.int64)
    number = rows.sample_index if rows.branch is None else (rows.sample_index << _BRANCH_BITS) + rows.branch
    count = 1 + int(ranks.max(torch.cat([number, none]).max()))
    keys = gather_column(rows.prompt_index * count + number, ranks)
    columns = gather_column(rewards.columns(), ranks)[keys.argsort()]
    # `share` gives each rank the same prompts.
    own = ranks.exchange_rows(rows, ((rows.prompt_index + 1) * ranks.size - 1) // len(samples.prompts))
    number = own.sample_index if own.branch is None else (own.sample_index << _BRANCH_BITS) + own.branch
    own_keys = own.prompt_index * count + number
    width = int(own.lengths.max()) if len(own.lengths) else own.tokens.size(1)
    own = select(own, own_keys.argsort(), width=width)
    rewards = rewards.with_columns(columns[torch.searchsorted(keys.sort().values, own_keys.sort().values)])
    return samples._replace(rollout=own, rewards=rewards)


def leave_unscored_out(rollout: Rollout, rewards: Rewards) -> tuple[Rollout, Rewards]:
    """Return both with rows without a reward marked as failed: off the loss mask, reward 0.

    Without a token on the loss mask a row is in no group, statistic or denominator, as if it had not been drawn.
    """
    left_out = rewards.totals.isnan()
    if not left_out.any():
        return rollout, rewards
    scored = scored_rows(rollout, rewards)
    mask = rollout.loss_mask & scored[:, None]
    fields = columns_of(rollout)
    fields |= {"failed": ~scored, "loss_mask": mask, "rollout_logprobs": rollout.rollout_logprobs * mask}
    if rollout.token_versions is not None:
        fields["token_versions"] = rollout.token_versions * mask
    parts = rewards.parts
    if parts is not None:
        parts = replace(parts, values=parts.values.masked_fill(left_out[:, None], 0.0))
    return Rollout.from_rows(**fields), replace(rewards, totals=rewards.totals.masked_fill(left_out, 0.0), parts=parts)


def shaped_rewards(
    rollout: Rollout, rewards: Rewards, ranks: Ranks, overlong: OverlongConfig, *, max_response_tokens: int
) -> tuple[Rewards, Metrics]:
    """Return rewards with the punishment of long responses, and its metrics; collective.

    max_response_tokens: length at which the punishment is the whole penalty.
    """
    punishment = torch.zeros_like(rewards.totals)
    if overlong.buffer_tokens:
        tokens = rollout.lengths - rollout.prompt_lengths  # the limit counts a tool's tokens, too
        if rollout.branch is not None:  # a trajectory's longest row counts
            number = (rollout.branch == 0).cumsum(0) - 1
            tokens = torch.zeros_like(tokens).scatter_reduce(0, number, tokens, "amax")[number]
        part = soft_punishment(tokens, limit=max_response_tokens, buffer=overlong.buffer_tokens)
        punishment = overlong.penalty * part
        parts = rewards.parts
        if parts is not None:
            values = torch.cat([parts.values, part[:, None]], dim=1)
            parts = RewardParts((*parts.names, "overlong"), (*parts.weights, overlong.penalty), values)
        rewards = replace(rewards, totals=rewards.totals + punishment, parts=parts)
    has_answer = answered(rollout) & first_rows(rollout)
    columns = (has_answer, punishment * has_answer, has_answer & ~rollout.finished)
    count, punished, truncated = ranks.sum(torch.stack([column.double().sum() for column in columns])).tolist()
    metrics: Metrics = {}
    if overlong.buffer_tokens:
        metrics["reward/overlong_punishment_mean"] = punished / max(count, 1.0)
    if overlong.filter:
        metrics["rollout/filtered_fraction"] = truncated / max(count, 1.0)
    return rewards, metrics


def soft_punishment(response_tokens: Tensor, *, limit: int, buffer: int) -> Tensor:
    """Return [B] float32, eq. 13: 0 to `limit - buffer` tokens, linear to -1 at `limit`."""
    return ((limit - buffer - response_tokens).double() / buffer).clamp(-1.0, 0.0).float()


def last_turns(mask: Tensor, branch: Tensor | None) -> Tensor:
    """Return [B, S] bool: tokens of each trajectory's last turn, a run on the mask.

    branch: as in `Rollout`, of whole trajectories.
    """
    turns_left = turn_ends(mask).int().flip(1).cumsum(1).flip(1)
    own = mask & (turns_left == 1)
    if branch is None:
        return own
    places, number = torch.arange(len(mask)), (branch == 0).cumsum(0) - 1
    last = torch.full_like(number, -1).scatter_reduce(0, number, places.where(mask.any(dim=1), -1), "amax")
    return own & (places == last[number])[:, None]


def narrowed(experience: Experience, trains: Tensor) -> Experience:
    """Return the experience with only tokens of `trains` on the loss mask.

    trains: bool, [B, S] or [B, 1].
    """
    experience.loss_mask = experience.loss_mask & trains
    experience.rows = row_numbers(experience.loss_mask, experience.branch)
    for name in PER_TOKEN:
        setattr(experience, name, getattr(experience, name) * experience.loss_mask)
    return experience
