"""Mini-batches: which prompts, independent of the layout, and which rank."""

from __future__ import annotations

import pytest
import torch

from mega_rl.data.minibatches import assign_rows, minibatch_prompt_blocks
from mega_rl.data.order import permutation


def test_blocks_hold_every_prompt_once() -> None:
    blocks = minibatch_prompt_blocks(10, 4, seed_key=(0, 1))
    assert [len(block) for block in blocks] == [4, 4, 2]
    assert sorted(position for block in blocks for position in block) == list(range(10))
    assert all(block == sorted(block) for block in blocks)


def test_blocks_depend_on_the_key_alone() -> None:
    a = minibatch_prompt_blocks(64, 16, seed_key=(7, 3, 0))
    assert a == minibatch_prompt_blocks(64, 16, seed_key=(7, 3, 0))
    assert a != minibatch_prompt_blocks(64, 16, seed_key=(7, 3, 1))
    assert a != minibatch_prompt_blocks(64, 16, seed_key=(7, 4, 0))
    assert a != minibatch_prompt_blocks(64, 16, seed_key=(8, 3, 0))


def test_the_permutation_never_changes() -> None:
    # Golden: a run resumed after an upgrade must go on in the same order.
    assert permutation(8, key=(0, 1)) == [3, 7, 4, 2, 1, 6, 5, 0]
    assert permutation(0, key=(0,)) == []
    assert sorted(permutation(1000, key=(3, 4, 5))) == list(range(1000))


@pytest.mark.parametrize("dp_size", [1, 2, 3])
def test_rows_of_a_block_are_dealt_out_evenly(dp_size: int) -> None:
    # Six prompts with two samples each, in any order; the block holds four of the prompts.
    prompt_index = torch.tensor([0, 0, 1, 1, 2, 2, 5, 5, 4, 4, 3, 3])
    lengths = torch.tensor([9, 1, 5, 5, 8, 2, 7, 3, 6, 4, 5, 5])
    block = [0, 2, 3, 5]
    destinations = assign_rows(prompt_index, lengths, block=block, dp_size=dp_size)
    assert destinations.dtype == torch.int64
    inside = torch.isin(prompt_index, torch.tensor(block))
    assert (destinations[~inside] == -1).all()
    counts = torch.bincount(destinations[inside], minlength=dp_size)
    assert counts.sum() == 8
    assert counts.max() - counts.min() <= 1
    tokens = torch.zeros(dp_size, dtype=torch.int64).index_add(0, destinations[inside], lengths[inside])
    assert tokens.sum() == 40
    if dp_size == 2:
        assert tokens.tolist() == [20, 20]


def test_row_counts_are_equal_beside_a_very_long_row() -> None:
    lengths = torch.tensor([1000, 1, 2, 3, 4, 5])
    destinations = assign_rows(torch.arange(6), lengths, block=list(range(6)), dp_size=2)
    assert torch.bincount(destinations).tolist() == [3, 3]


def test_fewer_rows_than_ranks() -> None:
    destinations = assign_rows(torch.tensor([0, 1]), torch.tensor([3, 4]), block=[1], dp_size=4)
    assert destinations.tolist() == [-1, 0]
