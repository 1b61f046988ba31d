"""Sums, gathers and exchanges of rows between ranks; the reference is the same operation on all rows in one process."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mega_rl.errors import RunError
from mega_rl.parallel.comm import GroupRanks, SingleRank, ranks_of
from mega_rl.types import Rollout, ends_of
from tests.helpers.counting import CollectiveRecorder
from tests.helpers.distributed import initialized, run_ranks

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
    return Rollout.from_rows(
        tokens,
        loss_mask=tokens % 2 == 1,
        prompt_lengths=row + 1,
        lengths=torch.full((count,), length),
        rollout_logprobs=-tokens.float() / 8,
        end=ends_of(row % 2 == 0),
        prompt_index=row + 100 * rank,
        sample_index=row,
        weight_version=torch.full((count,), 5),
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


def values(ranks: GroupRanks) -> None:
    """JSON values from all ranks."""
    for value in (lambda r: r, lambda r: [{"rank": r, "text": "ü" * 100 * r}, None, 1e-300, True], lambda r: ""):
        assert ranks.gather_json(value(ranks.rank)) == [value(other) for other in range(ranks.size)]


def refusals(ranks: GroupRanks) -> None:
    """What only one rank does wrong, all are told, and the group goes on."""
    last = ranks.size - 1
    wrong = ranks.rank == last
    others = ", ".join(map(str, range(last)))
    good = {"tokens": torch.zeros(2, 3), "answer": torch.zeros(2)}

    def gathered(**changes: Any) -> Callable[[], Any]:
        fields = {name: field for name, field in (good | (changes if wrong else {})).items() if field is not None}
        return lambda: ranks.gather_fields(fields)

    differs = "is not the same on all ranks:"
    cases: list[tuple[Callable[[], Any], str]] = [
        (gathered(tokens=torch.zeros(2, 3, 4)), f"; torch.float32 [B, S, 4] on rank(s) {last}"),
        (gathered(tokens=torch.zeros(2, 3).long()), f"; torch.int64 [B, S] on rank(s) {last}"),
        (gathered(tokens=None), f"field 'tokens' {differs} torch.float32 [B, S] on rank(s) {others}; missing on"),
    ]
    for number, (call, message) in enumerate(cases):
        with pytest.raises(RunError) as raised:
            call()
        assert message in str(raised.value), f"case {number}: {raised.value}"
    assert ranks.gather_json(ranks.rank) == list(range(ranks.size))


def ranks_compare(rank: int) -> None:
    size = int(os.environ["WORLD_SIZE"])
    built, _ = initialized()
    ranks = ranks_of(built.dp)
    assert isinstance(ranks, GroupRanks)
    assert (ranks.rank, ranks.size) == (rank, size)
    reductions(ranks)
    values(ranks)
    refusals(ranks)
    everyone = [rollout(other, size) for other in range(size)]
    length = max(LENGTHS[size])
    for strided in (False, True):
        mine = rollout(rank, size, strided=strided)
        expect(ranks.gather_rows(mine), everyone, length)
        arriving = [everyone[source][destinations(source, size) == rank] for source in range(size)]
        expect(ranks.exchange_rows(mine, destinations(rank, size)), arriving, length)


def reductions(ranks: SingleRank | GroupRanks) -> None:
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


class Allocated(TorchDispatchMode):
    """Bytes of the storages that appear while it is active."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.storages = {tensor.untyped_storage().data_ptr(): 0 for tensor in known}
        self._kept: list[Tensor] = []  # so that no storage takes the place of another

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor):
                self._kept.append(tensor)
                self.storages.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
        return result


def bytes_of_a_gather(rank: int) -> tuple[int, int, dict[str, int]]:
    """(allocated, result, sent by operation) of rows of which rank 0 has most."""
    built, _ = initialized()
    ranks = GroupRanks(built.dp)
    count = 5 if rank == 0 else 1
    tokens = torch.full((count, 1000 + rank, 3), rank)
    with CollectiveRecorder() as recorder, Allocated(tokens) as memory:
        gathered = ranks.gather_fields({"tokens": tokens})["tokens"]
    large: dict[str, int] = {}
    for call in recorder.collectives:
        if call.nbytes > 10_000:
            large[call.op] = large.get(call.op, 0) + call.nbytes
    return sum(memory.storages.values()), gathered.nbytes, large


def test_gathered_rows_are_allocated_and_sent_once() -> None:
    """Not once for every rank: beside the result there are numbers of rows and names of fields alone."""
    for allocated, result, sent in run_ranks(4, bytes_of_a_gather, strict=False):
        assert result == 8 * 1003 * 3 * 8
        assert result <= allocated < 1.1 * result
        assert sent == {"broadcast": result}


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_equal_one_process(size: int) -> None:
    run_ranks(size, ranks_compare)


@pytest.mark.parametrize("wrong", [torch.tensor([0, 0, 1]), torch.tensor([0, 0, -1]), torch.tensor([0, 0])])
def test_destinations_outside_the_group_are_refused(wrong: Tensor) -> None:
    with pytest.raises(AssertionError, match="destinations"):
        SingleRank().exchange_rows(rollout(0, 2), wrong)
