"""Rows of batches: check them, choose and join them, move them between ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mega_rl.errors import RunError
from mega_rl.parallel.agreement import raise_together
from mega_rl.parallel.comm import share
from mega_rl.protocols import Ranks
from mega_rl.types import Experience, Prompt, Rewards, Rollout, row_numbers

# (rollout, row) -> the response as rewards read it, and the same with what others wrote between the policy's turns.
ReadResponse = Callable[[Rollout, int], tuple[str, str]]


class Samples(NamedTuple):
    """Scored samples of a step, as this data-parallel replica has them."""

    prompts: Sequence[Prompt]  # the global batch, into which `rollout.prompt_index` points
    rollout: Rollout
    rewards: Rewards  # one for each row

    def select(self, rows: Tensor) -> Samples:
        """Return the rows with these numbers, in their order; rows: [n] int64."""
        return Samples(self.prompts, select(self.rollout, rows), self.rewards[rows])

    def join(self, other: Samples) -> Samples:
        """Return the rows and prompts of both, padded to one width; `other` numbers prompts from 0.

        A component of the rewards that the rows of one side lack is NaN there, or 0 if none of them has been scored.
        Where failures are known for one side, the rows of the other count as answered.
        """
        theirs = select(other.rollout, torch.arange(len(other.rollout.lengths)))
        theirs.prompt_index = theirs.prompt_index + len(self.prompts)
        rollouts = (self.rollout, theirs)
        if any(rollout.failed is not None for rollout in rollouts):
            for rollout in rollouts:
                rollout.failed = ~answered(rollout)
        width = max(rollout.tokens.size(1) for rollout in rollouts)
        columns = [_columns(rollout) for rollout in rollouts]
        fields = {name: torch.cat([_widened(one[name], width) for one in columns]) for name in columns[0]}
        values = [_under_names_of(self.rewards, other.rewards), other.rewards.columns()]
        values = [_widened(one, max(rows.size(1) for rows in values)) for one in values]
        known = other.rewards if other.rewards.parts is not None and other.rewards.parts.names else self.rewards
        rewards = known.with_columns(torch.cat(values))
        return Samples([*self.prompts, *other.prompts], Rollout.from_rows(**fields), rewards)


def _under_names_of(first: Rewards, second: Rewards) -> Tensor:
    """Return the columns of the first under the components of the second, a superset."""
    columns, before, after = first.columns(), first.parts, second.parts
    if before is None or after is None or not before.names or before.names == after.names:
        return columns
    wide = columns.new_full((len(columns), 1 + len(after.names)), torch.nan)
    wide[:, [0, *(1 + after.names.index(name) for name in before.names)]] = columns
    return wide


def _widened(column: Tensor, width: int) -> Tensor:
    """Return [B, S, ...] padded with zeros to S = width; [B] unchanged."""
    if column.dim() == 1 or column.size(1) == width:
        return column
    return torch.cat([column, column.new_zeros(len(column), width - column.size(1), *column.shape[2:])], dim=1)


def _columns(rollout: Rollout) -> dict[str, Tensor]:
    """Return the fields of a rollout by name, without the optional fields that it lacks."""
    columns = {name: getattr(rollout, name) for name in Rollout.__annotations__}
    return {name: column for name, column in columns.items() if column is not None}


def select(rollout: Rollout, rows: Tensor, *, width: int | None = None) -> Rollout:
    """Return some rows in this order, cut to `width` tokens; rows: [n] int64."""
    columns = {name: column[rows] for name, column in _columns(rollout).items()}
    return Rollout.from_rows(**{n: c if c.dim() == 1 else c[:, :width] for n, c in columns.items()})


def answered(rollout: Rollout) -> Tensor:
    """Return [B] bool: rows whose sample has not failed."""
    return torch.ones_like(rollout.finished) if rollout.failed is None else ~rollout.failed


def scored_rows(rollout: Rollout, rewards: Rewards) -> Tensor:
    """Return [B] bool: rows that have an answer and a reward."""
    return answered(rollout) & ~rewards.totals.isnan().to(rollout.finished.device)


def token_versions(rollout: Rollout) -> Tensor:
    """Return [B, S] int64, version of the weights that sampled each token; undefined off the mask."""
    if rollout.token_versions is not None:
        return rollout.token_versions
    return rollout.weight_version[:, None].expand_as(rollout.tokens)


def check_rows(rollout: Rollout, prompts: Sequence[Prompt], ranks: Ranks, *, samples: int = 0) -> None:
    """Check that a rank has each sample of its prompts once, after its prompt's tokens.

    samples: number for each prompt, 0 for as many as the highest sample number says. Raises RunError on all ranks.
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


def moved_rows(experience: Experience, destinations: Tensor, ranks: Ranks) -> Experience:
    """Send each row to the rank that trains it; return the rows received, numbered anew; collective."""
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
