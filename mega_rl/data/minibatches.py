"""Mini-batches of prompts, and rows of different lengths balanced over ranks and into micro-batches."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

import torch
from torch import Tensor

from mega_rl.data.order import MINIBATCH, permutation


def minibatch_prompt_blocks(num_prompts: int, minibatch_size: int, *, seed_key: tuple[int, ...]) -> list[list[int]]:
    """Return each mini-batch as positions in the step's global batch of prompts, ascending.

    A random permutation of 0 .. num_prompts-1, a pure function of seed_key (run seed, step, epoch: say (0, 17, 1)), cut
    into blocks of `minibatch_size` prompts; the last may be smaller. All samples of a prompt are in one mini-batch,
    under every layout.
    """
    order = permutation(num_prompts, key=(*seed_key, MINIBATCH))
    return [sorted(order[first : first + minibatch_size]) for first in range(0, num_prompts, minibatch_size)]


def assign_rows(
    prompt_index: Tensor, lengths: Tensor, *, block: Sequence[int], dp_size: int, units: Tensor | None = None
) -> Tensor:
    """Return [B_global] int64: data-parallel rank of each row in this mini-batch, -1 for other rows.

    prompt_index, lengths, units: [B_global] int64, of the rows of all data-parallel ranks in rank order, the same on
    every rank. Ranks get equal numbers of units, give or take one, and about equal numbers of tokens.
    """
    chosen = torch.isin(prompt_index.cpu(), torch.tensor(block, dtype=torch.int64)).nonzero().squeeze(1)
    destinations = torch.full(prompt_index.shape, -1, dtype=torch.int64)
    groups = rows_of_units(len(chosen), None if units is None else units.cpu()[chosen])
    sizes = lengths.cpu()[chosen].tolist()
    parts = partition_balanced([sum(sizes[row] for row in group) for group in groups], dp_size, equal_counts=True)
    for rank, own in enumerate(parts):
        destinations[chosen[[row for number in own for row in groups[number]]]] = rank
    return destinations.to(prompt_index.device)


def rows_of_units(count: int, units: Tensor | None) -> list[list[int]]:
    """Return the rows of each unit, by first row; units [count] int64, None: single rows."""
    if units is None:
        return [[row] for row in range(count)]
    groups: dict[int, list[int]] = {}
    for row, unit in enumerate(units.tolist()):
        groups.setdefault(unit, []).append(row)
    return list(groups.values())


def minimum_microbatches(lengths: Sequence[int], max_tokens: int) -> int:
    """Return how many micro-batches of at most `max_tokens` tokens these sequences need; 0 for none."""
    return len(_best_fit(lengths, max_tokens))


def plan_microbatches(lengths: Sequence[int], *, max_tokens: int, count: int | None = None) -> list[list[int]]:
    """Return rows of the fewest micro-batches of at most `max_tokens` tokens, about evenly filled.

    `count` asks for that many instead, at least `minimum_microbatches`: data-parallel ranks agree on the largest of
    theirs, so that all run the same number of passes. Micro-batches are ordered by tokens, heaviest first (what does
    not fit in memory fails at once, and equal numbers meet equal work on other ranks); rows inside are in ascending
    order. With fewer rows than `count` the last micro-batches are empty: `packing` makes a dummy of each.
    """
    fitted = _best_fit(lengths, max_tokens)
    count = len(fitted) if count is None else count
    assert count >= len(fitted), f"{count} micro-batches of {max_tokens} tokens cannot hold what needs {len(fitted)}"
    bins = partition_balanced(lengths, count, equal_counts=False) if count else []
    if max((sum(lengths[row] for row in rows) for rows in bins), default=0) > max_tokens:
        # Balancing cares for the average and can overfill a bin where the fit is tight.
        bins = fitted + [[] for _ in range(count - len(fitted))]
    ordered = sorted(bins, key=lambda rows: (-sum(lengths[row] for row in rows), sorted(rows)))
    return [sorted(rows) for rows in ordered]


def partition_balanced(lengths: Sequence[int], parts: int, *, equal_counts: bool) -> list[list[int]]:
    """Return the ascending rows of `parts` parts with about equal sums of lengths; O(n log n).

    The longest row goes to the lightest part each time (Graham 1969: at most 4/3 of the optimum). With `equal_counts`
    the numbers of rows differ by at most one, and a part that has its number takes no more: the parts with the longest
    rows end up with the shortest ones as company. Fewer rows than parts leave parts empty.
    """
    assert parts >= 1, f"cannot divide into {parts} parts"
    smallest, larger_parts = divmod(len(lengths), parts) if equal_counts else (len(lengths), 0)
    out: list[list[int]] = [[] for _ in range(parts)]
    loads = [(0, part) for part in range(parts)]
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        load, part = loads[0]
        while len(out[part]) >= smallest + (larger_parts > 0):
            heapq.heappop(loads)
            load, part = loads[0]
        larger_parts -= len(out[part]) == smallest
        out[part].append(row)
        heapq.heapreplace(loads, (load + lengths[row], part))
    return [sorted(rows) for rows in out]


def _best_fit(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Fill bins of at most max_tokens: each row, longest first, goes where least room is left."""
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room left, bin), ascending
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        length = lengths[row]
        assert length <= max_tokens, f"a sequence of {length} tokens is longer than a micro-batch of {max_tokens}"
        place = bisect_left(rooms, (length, -1))
        if place < len(rooms):
            room, index = rooms.pop(place)
            bins[index].append(row)
        else:
            room, index = max_tokens, len(bins)
            bins.append([row])
        insort(rooms, (room - length, index))
    return bins
