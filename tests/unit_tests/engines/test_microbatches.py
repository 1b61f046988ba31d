"""How rows become micro-batches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mega_rl.data.packing import pad
from mega_rl.engines.microbatches import Batching
from mega_rl.parallel.comm import SingleRank
from mega_rl.types import Experience
from tests.helpers.models import random_experience


class Busier(SingleRank):
    """A data-parallel group in which another rank needs `most` micro-batches."""

    def __init__(self, most: int) -> None:
        self.most = most

    def max(self, tensor: Tensor) -> Tensor:
        return tensor.clamp(min=self.most)


def batching(*, packing: bool = True, max_tokens: int = 48, micro_batch_size: int = 3, **more: int) -> Batching:
    return Batching(packing=packing, max_tokens=max_tokens, micro_batch_size=micro_batch_size, **more)


def batch_of(lengths: list[int]) -> Experience:
    """Rows of these lengths."""
    batch = random_experience(num_prompts=len(lengths), samples=1)
    batch.lengths = torch.tensor(lengths)
    batch.prompt_lengths = torch.ones(len(lengths), dtype=torch.int64)
    return batch


def test_packed_micro_batches_keep_to_the_budget() -> None:
    """Every row once, at most the budget in each, and as few as can be: 96 tokens need two of 48."""
    micros = batching().split(batch_of([24, 24, 20, 4, 12, 12]), data_parallel=SingleRank())
    assert sorted(row for micro in micros for row in micro.rows) == list(range(6))
    assert [micro.tokens.shape for micro in micros] == [(1, 48), (1, 48)]
    assert all(micro.packed for micro in micros)


def test_padded_micro_batches_hold_a_number_of_rows() -> None:
    """The longest rows come first, so that padding is small and too little memory shows at once."""
    micros = batching(packing=False).split(batch_of([6, 24, 7, 22, 5, 23, 8]), data_parallel=SingleRank())
    assert [micro.rows for micro in micros] == [(1, 3, 5), (0, 2, 6), (4,)]
    assert [tuple(micro.tokens.shape) for micro in micros] == [(3, 24), (3, 8), (1, 5)]
    assert not any(micro.packed for micro in micros)


def test_packed_micro_batches_of_a_pipeline_have_one_shape() -> None:
    """Where that adds at most a twentieth: 94 tokens in two of 48, the missing ones in dummies as short as the rows."""
    batch = batch_of([12, 12, 12, 12, 12, 12, 11, 11])
    plain, same = (batching(same_shapes=on).split(batch, data_parallel=SingleRank()) for on in (False, True))
    assert [micro.tokens.shape for micro in plain] == [(1, 47), (1, 47)]
    batch = batch_of([12, 12, 12, 12, 12, 12, 12, 10])
    plain, same = (batching(same_shapes=on).split(batch, data_parallel=SingleRank()) for on in (False, True))
    assert [micro.tokens.shape for micro in plain] == [(1, 48), (1, 46)]
    assert [micro.tokens.shape for micro in same] == [(1, 48), (1, 48)]
    short = same[1]
    assert short.cu_seqlens is not None
    assert short.cu_seqlens.tolist()[-2:] == [46, 48]
    assert not any(field[:, 46:].any() for field in short.fields.values())
    for before, after in zip(plain, same, strict=True):
        assert (before.rows, before.lengths, before.max_seqlen) == (after.rows, after.lengths, after.max_seqlen)
        tokens = before.tokens.shape[1]
        assert torch.equal(after.tokens[:, :tokens], before.tokens)
        assert torch.equal(after.targets[:, :tokens], before.targets)


def test_padded_micro_batches_of_a_pipeline_have_one_shape() -> None:
    batch = batch_of([24, 24, 24, 24, 24, 23, 23, 23, 23])
    micros = batching(packing=False, same_shapes=True).split(batch, data_parallel=SingleRank())
    assert [tuple(micro.tokens.shape) for micro in micros] == [(3, 24), (3, 24), (3, 24)]
    fewer = pad(batch, [0], min_shape=(2, 30))
    assert tuple(fewer.tokens.shape) == (2, 30)
    assert fewer.rows == (0,)
    assert not fewer.tokens[1].any()
    assert not fewer.tokens[0, 24:].any()


@pytest.mark.parametrize(("packing", "lengths"), [(True, [24, 24, 24]), (False, [24, 24, 24, 24]), (True, [])])
def test_what_would_be_mostly_padding_keeps_its_shapes(packing: bool, lengths: list[int]) -> None:
    """Of 72 tokens in 48 and 24, or four rows in threes, a quarter and more; without rows there is nothing to pad."""
    batch = batch_of(lengths) if lengths else batch_of([9])[:0]
    plain, same = (
        [
            micro.tokens.shape
            for micro in batching(packing=packing, same_shapes=on).split(batch, data_parallel=Busier(2))
        ]
        for on in (False, True)
    )
    assert plain == same


@pytest.mark.parametrize("packing", [True, False])
def test_a_rank_with_less_work_ends_with_empty_micro_batches(packing: bool) -> None:
    """All ranks run as many passes as the busiest one; what is empty weighs nothing in a loss."""
    micros = batching(packing=packing, max_tokens=24, micro_batch_size=1).split(
        batch_of([24, 20]), data_parallel=Busier(4)
    )
    assert [micro.rows for micro in micros] == [(0,), (1,), (), ()]
    for micro in micros[2:]:
        assert micro.tokens.numel() == 1
        assert all(not field.any() for field in micro.fields.values())


@pytest.mark.parametrize(("packing", "most", "expected"), [(True, 1, 4), (False, 1, 4), (True, 5, 6), (False, 6, 6)])
def test_counts_are_multiples(packing: bool, most: int, expected: int) -> None:
    """The interleaved pipeline schedule takes whole rounds of micro-batches: here 3 needed, in twos."""
    made = batching(packing=packing, max_tokens=24, micro_batch_size=1, count_multiple=2).split(
        batch_of([24, 23, 22]), data_parallel=Busier(most)
    )
    assert len(made) == expected
    assert sorted(row for micro in made for row in micro.rows) == [0, 1, 2]


@pytest.mark.parametrize("packing", [True, False])
def test_context_parallel_ranks_share_every_micro_batch(packing: bool) -> None:
    """The same rows and boundaries on all, a quarter of the tokens on each; room for the padding of every sequence."""
    batch = batch_of([21, 21, 6])
    ranks = [
        batching(packing=packing, pad_to_multiple=16, cp_rank=rank, cp_size=4).split(batch, data_parallel=SingleRank())
        for rank in range(4)
    ]
    # 48 tokens would fit; with lengths rounded up to 8 they are 56.
    assert [len(micros) for micros in ranks] == [2 if packing else 1] * 4
    for shares in zip(*ranks, strict=True):
        assert len({share.rows for share in shares}) == 1
        assert all(share.tokens.shape == shares[0].tokens.shape for share in shares)
        width = 4 * shares[0].tokens.size(1)
        assert width % 16 == 0
        whole = torch.zeros(shares[0].tokens.size(0), width, dtype=torch.int64)
        for share in shares:
            assert share.held is not None
            whole[:, share.held] = share.tokens
            if packing:
                assert share.cu_seqlens is not None
                assert int(share.cu_seqlens[-1]) == width <= 48
                assert not (share.cu_seqlens % 8).any()
        inside = torch.cat([batch.tokens[row, : batch.lengths[row]] for row in shares[0].rows])
        assert sorted(whole[whole > 0].tolist()) == sorted(inside[inside > 0].tolist())
