"""Zigzag slices: the tokens of a micro-batch that a context-parallel rank holds.

A sequence of L tokens, L a multiple of 2 * cp, is cut into 2 * cp chunks of equal length; rank r holds the chunks r
and 2 * cp - 1 - r, one after the other. Under causal attention each such pair sees as many keys as any other. This is
the layout that Megatron-Core's rotary embedding and Transformer Engine's attention expect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mega_rl.data.packing import MicroBatch


def held_positions(lengths: Sequence[int], *, cp_rank: int, cp_size: int) -> Tensor:
    """Return [T / cp] int64, the positions that rank `cp_rank` holds, in its order; `lengths`: of the sequences."""
    if cp_size == 1:
        return torch.arange(sum(lengths))
    assert all(length % (2 * cp_size) == 0 for length in lengths), f"{lengths} are no multiples of 2 * {cp_size}"
    length = torch.tensor(lengths, dtype=torch.int64)
    chunk = length // (2 * cp_size)
    of = torch.repeat_interleave(torch.arange(len(length)), 2 * chunk)  # the sequence of each position
    inside = torch.arange(len(of)) - (2 * chunk).cumsum(0)[of] + 2 * chunk[of]
    second = inside >= chunk[of]
    # The first chunk begins after r others; from its end to the begin of the second there are 2 * (cp - 1 - r).
    skipped = chunk[of] * (cp_rank + 2 * (cp_size - 1 - cp_rank) * second)
    return (length.cumsum(0) - length)[of] + skipped + inside


def cut(micro: MicroBatch, *, cp_rank: int, cp_size: int) -> MicroBatch:
    """Return the part of a whole micro-batch that rank `cp_rank` holds, zigzag inside every sequence.

    Tensors of tokens become [1, T / cp] or [b, S / cp]; `cu_seqlens`, `max_seqlen`, `rows` and `lengths` stay those of
    the whole.
    """
    assert micro.held is None, "a micro-batch is cut once"
    if cp_size == 1:
        return micro
    lengths = [micro.tokens.size(1)] if micro.cu_seqlens is None else micro.cu_seqlens.diff().tolist()
    held = held_positions(lengths, cp_rank=cp_rank, cp_size=cp_size).to(micro.tokens.device)
    return replace(
        micro,
        tokens=micro.tokens.index_select(1, held),
        position_ids=micro.position_ids.index_select(1, held),
        targets=micro.targets.index_select(1, held),
        fields={name: field.index_select(1, held) for name, field in micro.fields.items()},
        held=held,
    )
