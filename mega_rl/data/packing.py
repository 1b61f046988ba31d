"""Micro-batches: rows of a padded batch in a model's layout, and outputs back in the batch's.

The model's output at position i belongs to the token at i + 1, while batches are aligned to that token (see
mega_rl.types). The shift between the two happens here and nowhere else.

Context parallelism cuts a micro-batch zigzag: a sequence of L tokens, L a multiple of 2 * cp, is 2 * cp chunks of equal
length, and rank r holds the chunks r and 2 * cp - 1 - r, one after the other. Under causal attention each such pair
sees as many keys as any other. Megatron-Core's rotary embedding and Transformer Engine's attention expect this layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mega_rl.types import Experience, Rollout


@dataclass(frozen=True)
class MicroBatch:
    """Rows of a batch for one forward pass; packed [1, T] (THD) or padded [b, S].

    Packed: sequences stand one after another, each followed by zeros that round its length up; when T is padded,
    sequences of zeros stand at the end, counted in `cu_seqlens` and in no row. Padded: zeros follow each row, and rows
    of zeros may follow. Without rows there is a single dummy sequence, so that a rank with fewer rows than the others
    can still take part in every collective. Under context parallelism a rank has only the columns `held`.
    """

    tokens: Tensor  # [1, T] or [b, S] int64
    position_ids: Tensor  # like tokens, int64, from 0 in every sequence
    targets: Tensor  # like tokens, int64: the token that position i predicts; 0 at sequence ends and on padding
    # [num_sequences + 1] int32 on the host, where packed sequences begin, zeros counted; None if padded
    cu_seqlens: Tensor | None
    max_seqlen: int  # longest sequence with its zeros; trailing dummies are at most as long
    rows: tuple[int, ...]  # rows of the batch, in order
    lengths: tuple[int, ...]  # their lengths, in tokens, without zeros
    fields: dict[str, Tensor]  # like tokens: the batch's value of token i + 1 at position i; 0 as in targets
    held: Tensor | None = None  # [T / cp] or [S / cp] int64, this rank's columns of the whole; None: all
    hidden: Tensor | None = None  # [tokens, H], a teacher's last hidden states at these positions

    @property
    def packed(self) -> bool:
        """Return whether the sequences are packed without padding."""
        return self.cu_seqlens is not None


@dataclass(frozen=True)
class _Cells:
    """Matching cells of a micro-batch (flat positions) and of a padded batch (row and column)."""

    flat: Tensor  # [N] int64
    row: Tensor  # [N] int64
    column: Tensor  # [N] int64


def pack(
    batch: Rollout | Experience,
    rows: Sequence[int],
    *,
    field_names: Iterable[str] = (),
    pad_to_multiple: int = 1,
    sequence_multiple: int = 1,
    min_tokens: int = 1,
) -> MicroBatch:
    """Pack rows of the batch one after another, without padding unless `sequence_multiple` asks for it.

    `field_names` are the batch's per-token tensors ([B, S]) that the loss needs. Every sequence is rounded up to
    `sequence_multiple` by tokens 0 at its end, and T, at least `min_tokens`, to `pad_to_multiple`, a multiple of it, by
    dummy sequences of token 0, none longer than the rows; the fields of all these are 0. No rows give a micro-batch of
    one dummy sequence.
    """
    assert pad_to_multiple % sequence_multiple == 0, f"{pad_to_multiple} is no multiple of {sequence_multiple}"
    lengths = _lengths(batch, rows)
    sequence_lengths = [_round_up(length, sequence_multiple) for length in lengths]
    total = sum(sequence_lengths)
    size = _round_up(max(total, min_tokens), pad_to_multiple)
    longest = max(sequence_lengths, default=size)
    sequence_lengths += [min(longest, size - start) for start in range(total, size, longest)]
    starts = torch.tensor([0, *sequence_lengths], dtype=torch.int64).cumsum(0)
    places = _cells(range(len(sequence_lengths)), sequence_lengths, starts[:-1], device=batch.tokens.device)
    return MicroBatch(
        position_ids=places.column.unsqueeze(0),
        cu_seqlens=starts.to(torch.int32),
        max_seqlen=max(sequence_lengths),
        **_content(batch, rows, lengths, starts[: len(lengths)], shape=(1, size), field_names=field_names),
    )


def pad(
    batch: Rollout | Experience,
    rows: Sequence[int],
    *,
    field_names: Iterable[str] = (),
    pad_to_multiple: int = 1,
    min_shape: tuple[int, int] = (1, 1),
) -> MicroBatch:
    """Right-pad rows of the batch with 0 to the longest, rounded up to `pad_to_multiple`.

    `field_names` as in `pack`. Dummy rows and zeros make it at least `min_shape`, so no rows give a dummy row.
    """
    lengths = _lengths(batch, rows)
    size = _round_up(max(*lengths, min_shape[1]) if lengths else min_shape[1], pad_to_multiple)
    shape = (max(len(rows), min_shape[0]), size)
    starts = torch.arange(len(rows), dtype=torch.int64) * size
    return MicroBatch(
        position_ids=torch.arange(size, device=batch.tokens.device).expand(shape).contiguous(),
        cu_seqlens=None,
        max_seqlen=size,
        **_content(batch, rows, lengths, starts, shape=shape, field_names=field_names),
    )


def scatter_back(values: Tensor, micro: MicroBatch, out: Tensor) -> None:
    """Write a model's outputs for one micro-batch into padded batch `out`, each at its token.

    values: like micro.tokens, any floating dtype (converted to out's); out [B, S]. The tokens 1 .. length - 1 of each
    row are written, as far as the micro-batch has the positions that predict them; the first token, which nothing
    predicts, and the padding keep their values.
    """
    assert values.shape == micro.tokens.shape, f"values are {tuple(values.shape)}, tokens {tuple(micro.tokens.shape)}"
    starts, width = _starts(micro)
    cells = _predicted(micro.rows, micro.lengths, starts, device=values.device)
    if micro.held is not None:
        cells = _among(cells, micro.held.to(values.device), width=width)
    out[cells.row, cells.column] = values.reshape(-1)[cells.flat].to(out.dtype)


def token_places(micro: MicroBatch, *, width: int) -> Tensor:
    """Return each token's place in a flattened [B, width] batch, without the shift of `fields`."""
    starts, columns = _starts(micro)
    cells = _cells(micro.rows, micro.lengths, starts, device=micro.tokens.device)
    if micro.held is not None:
        cells = _among(cells, micro.held.to(micro.tokens.device), width=columns)
    places = torch.full_like(micro.tokens, -1)
    places.view(-1)[cells.flat] = cells.row * width + cells.column
    return places


def _starts(micro: MicroBatch) -> tuple[Tensor, int]:
    """Return ([rows] int64 flat first position per row, columns) of the whole micro-batch, on the host."""
    if micro.cu_seqlens is None:
        return torch.arange(len(micro.rows), dtype=torch.int64) * micro.max_seqlen, micro.max_seqlen
    bounds = micro.cu_seqlens.to(torch.int64)
    return bounds[: len(micro.rows)], int(bounds[-1])


def _lengths(batch: Rollout | Experience, rows: Sequence[int]) -> tuple[int, ...]:
    lengths = batch.lengths.tolist()
    chosen = tuple(lengths[row] for row in rows)
    assert all(length >= 1 for length in chosen), "a row without tokens cannot be packed"
    return chosen


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _cells(rows: Sequence[int], counts: Sequence[int], starts: Tensor, *, device: torch.device) -> _Cells:
    """Return the first `counts[k]` columns of batch row `rows[k]`, from flat position `starts[k]` on."""
    count = torch.tensor(counts, dtype=torch.int64)
    sequence = torch.repeat_interleave(torch.arange(len(counts)), count)
    column = torch.arange(len(sequence)) - (count.cumsum(0) - count)[sequence]
    row = torch.tensor(rows, dtype=torch.int64)[sequence]
    return _Cells(flat=(starts[sequence] + column).to(device), row=row.to(device), column=column.to(device))


def _predicted(rows: Sequence[int], lengths: Sequence[int], starts: Tensor, *, device: torch.device) -> _Cells:
    """Return positions that predict a token of their sequence, and its place in the batch."""
    cells = _cells(rows, [length - 1 for length in lengths], starts, device=device)
    return _Cells(flat=cells.flat, row=cells.row, column=cells.column + 1)


def _among(cells: _Cells, held: Tensor, *, width: int) -> _Cells:
    """Return the cells in the columns `held`, with flat positions counted in these columns only."""
    place = torch.full((width,), -1, dtype=torch.int64, device=held.device)
    place[held] = torch.arange(len(held), device=held.device)
    column = place[cells.flat % width]
    kept = column >= 0
    flat = (cells.flat // width * len(held) + column)[kept]
    return _Cells(flat=flat, row=cells.row[kept], column=cells.column[kept])


def _content(
    batch: Rollout | Experience,
    rows: Sequence[int],
    lengths: tuple[int, ...],
    starts: Tensor,
    *,
    shape: tuple[int, int],
    field_names: Iterable[str],
) -> dict[str, Any]:
    """Return `rows`, `lengths`, `tokens` and, one position earlier, `targets` and `fields`."""

    def gathered(name: str, cells: _Cells) -> Tensor:
        source: Tensor = getattr(batch, name)
        assert source.shape == batch.tokens.shape, f"{name} is {tuple(source.shape)}, no per-token tensor"
        out = torch.zeros(shape, dtype=source.dtype, device=source.device)
        out.view(-1)[cells.flat] = source[cells.row, cells.column]
        return out

    own = _cells(rows, lengths, starts, device=batch.tokens.device)
    earlier = _predicted(rows, lengths, starts, device=batch.tokens.device)
    return {
        "rows": tuple(rows),
        "lengths": lengths,
        "tokens": gathered("tokens", own),
        "targets": gathered("tokens", earlier),
        "fields": {name: gathered(name, earlier) for name in field_names},
    }


def held_positions(lengths: Sequence[int], *, cp_rank: int, cp_size: int) -> Tensor:
    """Return [T / cp] int64: positions that `cp_rank` holds of sequences of `lengths`, in its order."""
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
