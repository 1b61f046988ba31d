"""Micro-batches: rows of a padded batch in the layout a model reads, and model outputs back in the batch's layout.

The model's output at position i speaks of the token at i + 1, while batches are aligned to the token spoken of (see
mega_rl.types). The shift between the two happens here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mega_rl.types import Experience, Rollout


@dataclass(frozen=True)
class MicroBatch:
    """Rows of a batch as one forward pass takes them; packed [1, T] (THD) or padded [b, S].

    Packed: sequences lie one after another; when T is padded, one more sequence of zeros stands at the end, counted in
    `cu_seqlens` and in no row. Padded: each row is followed by zeros. Without rows there is a single dummy sequence, so
    that a rank with fewer rows than its neighbours can still take part in every collective.
    """

    tokens: Tensor  # [1, T] or [b, S] int64
    position_ids: Tensor  # like tokens, int64, from 0 in every sequence
    targets: Tensor  # like tokens, int64: the token that position i predicts; 0 at sequence ends and on padding
    cu_seqlens: Tensor | None  # [num_sequences + 1] int32, where packed sequences begin; None when padded
    max_seqlen: int  # longest sequence, a trailing dummy included
    rows: tuple[int, ...]  # rows of the batch, in order
    lengths: tuple[int, ...]  # their lengths, in tokens
    fields: dict[str, Tensor]  # like tokens: the batch's value of token i + 1 at position i; 0 as in targets

    @property
    def packed(self) -> bool:
        """Whether the sequences are packed without padding."""
        return self.cu_seqlens is not None


@dataclass(frozen=True)
class _Cells:
    """Matching cells of a micro-batch (flat positions) and of a padded batch (row and column)."""

    flat: Tensor  # [N] int64
    row: Tensor  # [N] int64
    column: Tensor  # [N] int64


def pack(
    batch: Rollout | Experience, rows: Sequence[int], *, field_names: Iterable[str] = (), pad_to_multiple: int = 1
) -> MicroBatch:
    """Rows of the batch one after another, without padding between them.

    `field_names` are the batch's per-token tensors ([B, S]) that the loss needs. T is rounded up to `pad_to_multiple`
    by one dummy sequence of token 0 whose fields are 0. No rows give a micro-batch of `pad_to_multiple` dummy tokens.
    """
    lengths = _lengths(batch, rows)
    total = sum(lengths)
    size = _round_up(max(total, 1), pad_to_multiple)
    dummy = size - total
    sequence_lengths = [*lengths, dummy] if dummy else list(lengths)
    device = batch.tokens.device
    starts = torch.tensor([0, *sequence_lengths], dtype=torch.int64).cumsum(0)
    cu_seqlens = starts.to(torch.int32).to(device)
    cells = _cells(rows, lengths, starts[: len(lengths)], device=device)
    ends = torch.arange(dummy, device=device)
    return MicroBatch(
        tokens=_gather(batch.tokens, cells, size).unsqueeze(0),
        position_ids=torch.cat([cells.column, ends]).unsqueeze(0),
        cu_seqlens=cu_seqlens,
        max_seqlen=max(sequence_lengths),
        rows=tuple(rows),
        lengths=lengths,
        **_shifted(batch, rows, lengths, starts[: len(lengths)], shape=(1, size), field_names=field_names),
    )


def pad(
    batch: Rollout | Experience, rows: Sequence[int], *, field_names: Iterable[str] = (), pad_to_multiple: int = 1
) -> MicroBatch:
    """Rows of the batch under each other, padded on the right with 0 to the longest, rounded up to `pad_to_multiple`.

    `field_names` as in `pack`. No rows give a single dummy row of `pad_to_multiple` tokens.
    """
    lengths = _lengths(batch, rows)
    size = _round_up(max(lengths, default=1), pad_to_multiple)
    shape = (max(len(rows), 1), size)
    device = batch.tokens.device
    starts = torch.arange(len(rows), dtype=torch.int64) * size
    cells = _cells(rows, lengths, starts, device=device)
    return MicroBatch(
        tokens=_gather(batch.tokens, cells, shape[0] * size).view(shape),
        position_ids=torch.arange(size, device=device).expand(shape).contiguous(),
        cu_seqlens=None,
        max_seqlen=size,
        rows=tuple(rows),
        lengths=lengths,
        **_shifted(batch, rows, lengths, starts, shape=shape, field_names=field_names),
    )


def scatter_back(values: Tensor, micro: MicroBatch, out: Tensor) -> None:
    """Write a model's outputs for one micro-batch into a padded batch, each at the token it speaks of; in place.

    values: like micro.tokens, any floating dtype (converted to out's); out [B, S]. Of each row the tokens
    1 .. length - 1 are written; the first token, which nothing predicts, and the padding keep what they held.
    """
    assert values.shape == micro.tokens.shape, f"values are {tuple(values.shape)}, tokens {tuple(micro.tokens.shape)}"
    if micro.cu_seqlens is None:
        starts = torch.arange(len(micro.rows), dtype=torch.int64) * micro.tokens.shape[1]
    else:
        starts = torch.tensor([0, *micro.lengths], dtype=torch.int64).cumsum(0)[:-1]
    cells = _predicted(micro.rows, micro.lengths, starts, device=values.device)
    out[cells.row, cells.column] = values.reshape(-1)[cells.flat].to(out.dtype)


def _lengths(batch: Rollout | Experience, rows: Sequence[int]) -> tuple[int, ...]:
    lengths = batch.lengths.tolist()
    chosen = tuple(lengths[row] for row in rows)
    assert all(length >= 1 for length in chosen), "a row without tokens cannot be packed"
    return chosen


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _cells(rows: Sequence[int], counts: Sequence[int], starts: Tensor, *, device: torch.device) -> _Cells:
    """The first `counts[k]` columns of batch row `rows[k]`, laid out from flat position `starts[k]` on."""
    count = torch.tensor(counts, dtype=torch.int64)
    sequence = torch.repeat_interleave(torch.arange(len(counts)), count)
    column = torch.arange(len(sequence)) - (count.cumsum(0) - count)[sequence]
    row = torch.tensor(rows, dtype=torch.int64)[sequence]
    return _Cells(flat=(starts[sequence] + column).to(device), row=row.to(device), column=column.to(device))


def _predicted(rows: Sequence[int], lengths: Sequence[int], starts: Tensor, *, device: torch.device) -> _Cells:
    """Positions whose output speaks of a token of the same sequence, and that token's place in the batch."""
    cells = _cells(rows, [length - 1 for length in lengths], starts, device=device)
    return _Cells(flat=cells.flat, row=cells.row, column=cells.column + 1)


def _gather(source: Tensor, cells: _Cells, size: int) -> Tensor:
    out = torch.zeros(size, dtype=source.dtype, device=source.device)
    out[cells.flat] = source[cells.row, cells.column]
    return out


def _shifted(
    batch: Rollout | Experience,
    rows: Sequence[int],
    lengths: Sequence[int],
    starts: Tensor,
    *,
    shape: tuple[int, int],
    field_names: Iterable[str],
) -> dict[str, Any]:
    """`targets` and `fields` of a micro-batch: the batch's tokens and per-token tensors, one position earlier."""
    cells = _predicted(rows, lengths, starts, device=batch.tokens.device)
    fields = {}
    for name in field_names:
        source: Tensor = getattr(batch, name)
        assert source.shape == batch.tokens.shape, f"{name} is {tuple(source.shape)}, no per-token tensor"
        fields[name] = _gather(source, cells, shape[0] * shape[1]).view(shape)
    return {"targets": _gather(batch.tokens, cells, shape[0] * shape[1]).view(shape), "fields": fields}
