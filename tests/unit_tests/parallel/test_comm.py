"""Sums, gathers and exchanges of rows between ranks; the reference is the same operation on all rows in one process."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from mega_rl.parallel.comm import GroupRanks, SingleRank
from mega_rl.types import Rollout
from tests.helpers.distributed import run_ranks

BATCHES = {2: [3, 0], 4: [2, 0, 5, 1]}  # rows of each rank
LENGTHS = {2: [4, 7], 4: [6, 9, 3, 6]}  # padded length of each rank


def rollout(rank: int, size: int, *, strided: bool = False) -> Rollout:
    """Rows that say where they come from: token = 1000 * rank + 10 * row + position."""
    count, length = BATCHES[size][rank], LENGTHS[size][rank]
    tokens = 1000 * rank + 10 * torch.arange(count)[:, None] + torch.arange(length)[None]
    if strided:
        tokens = tokens.t().contiguous().t()
        assert count < 2 or not tokens.is_contiguous()
    row = torch.arange(count)
    return Rollout(
        tokens=tokens,
        loss_mask=tokens % 2 == 1,
        prompt_lengths=row + 1,
        lengths=torch.full((count,), length),
        rollout_logprobs=-tokens.float() / 8,
        finished=row % 2 == 0,
        prompt_index=row + 100 * rank,
        sample_index=row,
        weight_version=torch.full((count,), 5),
        batch_size=[count],
    )


def padded(field: Tensor, length: int) -> Tensor:
    return torch.nn.functional.pad(field, (0, length - field.shape[1])) if field.dim() == 2 else field


def destinations(rank: int, size: int) -> Tensor:
    return (torch.arange(BATCHES[size][rank]) * 3 + rank) % size


def expect(actual: Rollout, parts: list[Rollout], length: int) -> None:
    """Equal to the parts, one after the other, padded to `length`; dtypes too."""
    assert actual.batch_size[0] == sum(len(part.tokens) for part in parts)
    for name, field in actual.items():
        expected = torch.cat([padded(getattr(part, name), length) for part in parts])
        assert field.dtype == expected.dtype, name
        assert torch.equal(field, expected), name


def ranks_compare(rank: int) -> None:
    from mega_rl.accelerator import prepare

    accelerator = prepare("auto")
    from mega_rl.parallel import groups
    from mega_rl.parallel.layout import ParallelLayout

    size = int(os.environ["WORLD_SIZE"])
    built = groups.initialize(ParallelLayout(world_size=size), accelerator=accelerator, timeout_s=60)
    ranks = GroupRanks(built.dp)
    assert (ranks.rank, ranks.size) == (rank, size)
    reductions(ranks)
    everyone = [rollout(other, size) for other in range(size)]
    length = max(LENGTHS[size])
    for strided in (False, True):
        mine = rollout(rank, size, strided=strided)
        expect(ranks.gather_rows(mine), everyone, length)
        arriving = [everyone[source][destinations(source, size) == rank] for source in range(size)]
        expect(ranks.exchange_rows(mine, destinations(rank, size)), arriving, length)


def reductions(ranks: GroupRanks) -> None:
    """Sum, max and broadcast of every kind of tensor."""
    size, rank = ranks.size, ranks.rank
    # A strided tensor: gloo's own all_reduce gets this one wrong.
    strided = (torch.arange(16.0).view(4, 4) + rank).t()[:, ::2]
    kept = strided.clone()
    expected = sum((torch.arange(16.0).view(4, 4) + other).t()[:, ::2] for other in range(size))
    assert torch.equal(ranks.sum(strided), expected)
    assert torch.equal(strided, kept), "the input changed"
    assert torch.equal(ranks.max(strided), (torch.arange(16.0).view(4, 4) + size - 1).t()[:, ::2])
    assert torch.equal(ranks.broadcast(strided), torch.arange(16.0).view(4, 4).t()[:, ::2])
    for dtype in (torch.int64, torch.float64, torch.bfloat16):
        assert ranks.sum(torch.tensor(rank + 1, dtype=dtype)) == size * (size + 1) // 2
        assert ranks.max(torch.tensor(-rank, dtype=dtype)).dtype == dtype
    learned = torch.ones(2, requires_grad=True)
    assert not ranks.sum(learned).requires_grad


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_equal_one_process(size: int) -> None:
    run_ranks(size, ranks_compare)


def test_a_single_rank_moves_nothing_and_copies() -> None:
    ranks = SingleRank()
    assert (ranks.rank, ranks.size) == (0, 1)
    tensor = torch.arange(3.0)
    for copy in (ranks.sum(tensor), ranks.max(tensor), ranks.broadcast(tensor)):
        assert torch.equal(copy, tensor)
        assert copy.data_ptr() != tensor.data_ptr()
    rows = rollout(0, 2)
    for moved in (ranks.gather_rows(rows), ranks.exchange_rows(rows, torch.zeros(3, dtype=torch.int64))):
        expect(moved, [rows], 4)
        assert moved.tokens.data_ptr() != rows.tokens.data_ptr()


@pytest.mark.parametrize("wrong", [torch.tensor([0, 0, 1]), torch.tensor([0, 0, -1]), torch.tensor([0, 0])])
def test_destinations_outside_the_group_are_refused(wrong: Tensor) -> None:
    with pytest.raises(AssertionError, match="destinations"):
        SingleRank().exchange_rows(rollout(0, 2), wrong)
