"""Assignment of prompts to mini-batches, and of their rows to ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mega_rl.data.balancing import partition_balanced
from mega_rl.data.ordering import MINIBATCH, permutation


def minibatch_prompt_blocks(num_prompts: int, minibatch_size: int, *, seed_key: tuple[int, ...]) -> list[list[int]]:
    """Positions in the step's global batch of prompts that form each mini-batch, ascending within one.

    A random permutation of 0 .. num_prompts-1, a pure function of seed_key (run seed, step, epoch: say (0, 17, 1)), cut
    into blocks of `minibatch_size` prompts; the last may be smaller. All samples of a prompt are in one mini-batch, and
    no layout has a say in it.
    """
    order = permutation(num_prompts, key=(*seed_key, MINIBATCH))
    return [sorted(order[first : first + minibatch_size]) for first in range(0, num_prompts, minibatch_size)]


def assign_rows(prompt_index: Tensor, lengths: Tensor, *, block: Sequence[int], dp_size: int) -> Tensor:
    """[B_global] int64: the data-parallel rank that trains each row of this mini-batch, -1 for rows of other ones.

    prompt_index, lengths: [B_global] int64, of the rows of all data-parallel ranks in rank order, the same on every
    rank. Ranks get equal numbers of rows, give or take one, and about equal numbers of tokens.
    """
    chosen = torch.isin(prompt_index.cpu(), torch.tensor(block, dtype=torch.int64)).nonzero().squeeze(1)
    destinations = torch.full(prompt_index.shape, -1, dtype=torch.int64)
    parts = partition_balanced(lengths.cpu()[chosen].tolist(), dp_size, equal_counts=True)
    for rank, rows in enumerate(parts):
        destinations[chosen[rows]] = rank
    return destinations.to(prompt_index.device)
