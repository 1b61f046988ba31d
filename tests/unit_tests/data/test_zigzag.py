"""Slices of micro-batches: together they are the whole, and each is what Megatron-Core's layout says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_rl.data.packing import MicroBatch, cut, held_positions, pack, pad, scatter_back
from tests.unit_tests.data.test_packing import FIELDS, Make, batch_of

SIZES = st.sampled_from([1, 2, 3, 4, 8])


def make_whole(make: Make, lengths: list[int], rows: list[int], cp_size: int, *, more: int = 1) -> MicroBatch:
    """A micro-batch whose sequences can be cut for `cp_size` ranks."""
    multiple = 2 * cp_size if cp_size > 1 else 1
    extra = {"sequence_multiple": multiple} if make is pack else {}
    batch = batch_of(lengths, size=max(lengths) + 1)
    return make(batch, rows, field_names=FIELDS, pad_to_multiple=multiple * more, **extra)


def per_token(micro: MicroBatch) -> dict[str, torch.Tensor]:
    """Every tensor of tokens."""
    return {"tokens": micro.tokens, "position_ids": micro.position_ids, "targets": micro.targets, **micro.fields}


@pytest.mark.parametrize(("rank", "expected"), [(0, [0, 1, 6, 7, 8, 11]), (1, [2, 3, 4, 5, 9, 10])])
def test_two_ranks_by_hand(rank: int, expected: list[int]) -> None:
    """Sequences of 8 and 4 tokens: chunks of 2 and of 1; the first rank has the first and the last."""
    assert held_positions([8, 4], cp_rank=rank, cp_size=2).tolist() == expected


def test_three_ranks_by_hand() -> None:
    assert [held_positions([6], cp_rank=rank, cp_size=3).tolist() for rank in range(3)] == [[0, 5], [1, 4], [2, 3]]


@settings(max_examples=60, deadline=None)
@given(chunks=st.lists(st.integers(0, 9), max_size=6), cp_size=SIZES)
def test_chunks_in_the_order_of_the_definition(chunks: list[int], cp_size: int) -> None:
    """Against chunks cut one by one."""
    lengths = [2 * cp_size * chunk for chunk in chunks]
    for rank in range(cp_size):
        expected: list[int] = []
        start = 0
        for length, chunk in zip(lengths, chunks, strict=True):
            pieces = [list(range(start + i * chunk, start + (i + 1) * chunk)) for i in range(2 * cp_size)]
            expected += pieces[rank] + pieces[2 * cp_size - 1 - rank]
            start += length
        assert held_positions(lengths, cp_rank=rank, cp_size=cp_size).tolist() == expected


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8), cp_size=SIZES, more=st.integers(1, 3))
@pytest.mark.parametrize("make", [pack, pad])
def test_slices_together_are_the_whole(make: Make, lengths: list[int], cp_size: int, more: int) -> None:
    """Every bit of every tensor once, and every field of the batch finds its way back from the slices."""
    rows = list(range(len(lengths)))[::-1]
    whole = make_whole(make, lengths, rows, cp_size, more=more)
    slices = [cut(whole, cp_rank=rank, cp_size=cp_size) for rank in range(cp_size)]
    for name, tensor in per_token(whole).items():
        together = torch.full_like(tensor, True if tensor.dtype == torch.bool else -9)
        for one in slices:
            held = torch.arange(tensor.size(1)) if one.held is None else one.held
            together[:, held] = per_token(one)[name]
        assert torch.equal(together, tensor), name
    taken = torch.cat([torch.arange(whole.tokens.size(1)) if s.held is None else s.held for s in slices])
    assert sorted(taken.tolist()) == list(range(whole.tokens.size(1)))
    batch = batch_of(lengths, size=max(lengths) + 1)
    returned = torch.full_like(batch.rollout_logprobs, 5.0)
    for one in slices:
        assert (one.cu_seqlens is None) == (whole.cu_seqlens is None)
        scatter_back(one.fields["rollout_logprobs"], one, returned)
    assert torch.equal(returned[batch.loss_mask], batch.rollout_logprobs[batch.loss_mask])
    assert (returned[~batch.loss_mask] == 5.0).all()
