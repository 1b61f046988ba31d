"""Gradients reduced in FP32 whatever travels: every rank adds up its own shard, in rank order.

An all-to-all brings each rank the other ranks' contributions to its shard in the buckets' dtype; the sum runs in FP32
and is rounded once, at the end. A ring reduce-scatter of bf16 rounds after every addition instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

Rows = Tensor | Sequence[Tensor]  # a row [n] per rank, as one tensor or not

BLOCK = 1 << 16  # elements that the sum on CPU takes at a time: their FP32 total stays in the second-level cache
PIECE_BYTES = 256 << 20  # largest message buffer; a bucket beyond it is exchanged in pieces


@dataclass(eq=False)
class Scratch:
    """Receive buffers for at most `slots` exchanges at a time.

    When all are lent, the oldest exchange is finished first, so memory is bounded whatever the number of buckets in
    flight. Every rank starts its exchanges in the same order, so this cannot make two ranks wait for each other.
    """

    largest: int  # bytes of the largest bucket to come
    slots: int = 2
    _free: list[Tensor] = field(default_factory=list)
    _lent: list[Tensor] = field(default_factory=list)  # to the exchange that is being started
    _pending: list[_Piece] = field(default_factory=list)

    def step(self, *, ranks: int, dtype: torch.dtype) -> int:
        """Return the elements per rank that one exchange may carry."""
        return -(-min(PIECE_BYTES, self.largest) // dtype.itemsize // ranks)

    def lend(self, numel: int, *, like: Tensor) -> Tensor:
        """Return a buffer [numel] for one exchange, lent until its `_Piece` is finished."""
        while len(self._pending) >= self.slots:
            self._pending[0].finish()
        size = numel * like.element_size()
        buffer = self._free.pop() if self._free else like.new_empty(0, dtype=torch.uint8)
        if buffer.numel() < size:
            # No larger one will be needed, so all are of one size; the ends of a bucket may be uneven by some bytes.
            buffer = like.new_empty(max(size, min(PIECE_BYTES, self.largest) + 4096), dtype=torch.uint8)
        self._lent.append(buffer)
        return buffer[:size].view(like.dtype)

    def start(self, piece: _Piece) -> None:
        """Register a pending exchange with the buffers lent to it."""
        piece.buffers, self._lent = self._lent, []
        self._pending.append(piece)

    def give_back(self, piece: _Piece) -> None:
        """Release the buffers of a finished exchange."""
        self._pending.remove(piece)
        self._free += piece.buffers
        piece.buffers = []

    @property
    def nbytes(self) -> int:
        """Return the bytes of memory held now."""
        return sum(buffer.nbytes for buffer in [*self._free, *(b for piece in self._pending for b in piece.buffers)])

    def release(self) -> int:
        """Free the memory until the next exchange; return its bytes."""
        assert not self._pending, "gradients are still travelling"
        size = self.nbytes
        self._free.clear()
        return size


@dataclass(eq=False)
class _Piece:
    """One all-to-all and the sum that follows it."""

    work: dist.Work | None
    rows: Rows  # each rank's contribution [n], complete after `work`
    out: Tensor  # [n] this rank's part of the result
    divisor: int
    across: ProcessGroup | None
    scratch: Scratch
    buffers: list[Tensor] = field(default_factory=list)
    done: bool = False

    def finish(self) -> None:
        """Wait for the exchange and write the sum; a no-op the second time."""
        if self.done:
            return
        self.done = True
        if self.work is not None:
            self.work.wait()
        if self.out.numel() and self.across is None:
            sum_rows(self.rows, self.out, divisor=self.divisor)
        elif self.out.numel():
            total = torch.empty(self.out.shape, dtype=torch.float32, device=self.out.device)
            sum_rows(self.rows, total)
            dist.all_reduce(total, group=self.across)
            self.out.copy_(total.div_(self.divisor))  # the only rounding, after the sum over optimizer instances
        self.scratch.give_back(self)


@dataclass(eq=False)
class Reduction:
    """Handle of a pending reduction."""

    pieces: list[_Piece]
    shards: Sequence[Tensor] | None = None  # each rank's part, if every rank wants the whole
    group: ProcessGroup | None = None

    def wait(self) -> None:
        """Wait for the result (on CUDA: in the stream's order)."""
        for piece in self.pieces:
            piece.finish()
        if self.shards is not None and self.group is not None:
            broadcast_shards(self.shards, group=self.group).wait()


@dataclass(eq=False)
class Works:
    """Handle of several asynchronous operations."""

    works: Sequence[dist.Work | Reduction | Works]

    def wait(self) -> None:
        """Wait for all operations."""
        for work in self.works:
            work.wait()


def sum_rows(rows: Rows, out: Tensor, *, divisor: int = 1) -> None:
    """out = (rows[0] + rows[1] + ...) / divisor in FP32, rounded once to `out`'s dtype.

    rows [n] of any floating dtype, one per rank, on CUDA as one tensor; out [n], may be one of the rows. On CPU the
    additions go in the order of rows; on CUDA in that of `torch.sum`, which is one kernel with an FP32 accumulator.
    """
    if len(rows) == 1 and rows[0].data_ptr() == out.data_ptr():
        return  # a group of one, in place
    if out.device.type != "cpu":
        assert isinstance(rows, Tensor)
        shared = rows.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()
        if divisor > 1 or shared or out.dtype != rows.dtype:
            out.copy_(torch.sum(rows, dim=0, dtype=torch.float32).div_(divisor))
        elif len(rows) == 2:
            torch.add(rows[0], rows[1], out=out)  # torch.sum of two rows reached 0.38 of a copy's bandwidth
        else:
            torch.sum(rows, dim=0, out=out)
        return
    total = torch.empty(min(BLOCK, out.numel()))
    for start in range(0, out.numel(), BLOCK):
        first, *others = (row[start : start + BLOCK] for row in rows)
        part = out[start : start + BLOCK]
        if len(others) == 1 and divisor == 1 and part.dtype == first.dtype:
            torch.add(first, others[0], out=part)  # one addition is rounded once in any case
            continue
        block = total[: len(part)].copy_(first)
        for row in others:
            block.add_(row)
        part.copy_(block.div_(divisor) if divisor > 1 else block)


def reduce_scatter_fp32(
    output: Tensor,
    input: Tensor,
    *,
    group: ProcessGroup,
    scratch: Scratch,
    across: ProcessGroup | None = None,
    mean: bool = False,
) -> Reduction:
    """Start a reduce-scatter with FP32 sums: `output` gets this rank's part of the sum, or of the mean.

    input [ranks * n], output [n], contiguous and of one dtype, which is what travels; output may be this rank's part
    of `input`. `across` is a second group that the result is summed over. The sum over `group` goes in rank order.
    """
    ranks = group.size()
    assert input.numel() == ranks * output.numel(), f"{input.numel()} elements for {ranks} parts of {output.numel()}"
    shards = input.chunk(ranks) if ranks > 1 else (input,)
    return Reduction(_exchange(output, input, shards, group=group, across=across, mean=mean, scratch=scratch))


def all_reduce_fp32(
    tensor: Tensor,
    *,
    group: ProcessGroup,
    scratch: Scratch,
    across: ProcessGroup | None = None,
    mean: bool = False,
) -> Reduction:
    """Start an all-reduce in place: the result of `reduce_scatter_fp32` on every rank; any number of elements."""
    ranks, count = group.size(), tensor.numel()
    size = -(-count // ranks)
    shards = [tensor[min(rank * size, count) : min((rank + 1) * size, count)] for rank in range(ranks)]
    pieces = _exchange(shards[group.rank()], tensor, shards, group=group, across=across, mean=mean, scratch=scratch)
    return Reduction(pieces, shards, group)


def broadcast_shards(shards: Sequence[Tensor], *, group: ProcessGroup) -> Works:
    """Broadcast every rank's shard, in place: an all-gather for shards of different sizes, faster on gloo."""
    if group.size() == 1:
        return Works([])
    works = [
        dist.broadcast(shard, group_src=rank, group=group, async_op=True)
        for rank, shard in enumerate(shards)
        if shard.numel()
    ]
    return Works([work for work in works if work is not None])


def _exchange(
    output: Tensor,
    input: Tensor,
    shards: Sequence[Tensor],
    *,
    group: ProcessGroup,
    across: ProcessGroup | None,
    mean: bool,
    scratch: Scratch,
) -> list[_Piece]:
    """Start every all-to-all of a reduction; `shards` are the parts of `input` in rank order."""
    ranks = group.size()
    divisor = ranks * (1 if across is None else across.size()) if mean else 1
    longest = max(shard.numel() for shard in shards)
    step = scratch.step(ranks=ranks, dtype=input.dtype)
    pieces = []
    for start in range(0, longest, step):
        parts, out = [shard[start : start + step] for shard in shards], output[start : start + step]
        work, rows = None, parts[0].unsqueeze(0)  # a group of one sends nothing
        if ranks > 1:
            sizes = [part.numel() for part in parts]
            rows = scratch.lend(ranks * out.numel(), like=input).view(ranks, out.numel())
            sent = input  # one exchange of a whole bucket needs no copy
            if step < longest:
                sent = torch.cat(parts, out=scratch.lend(sum(sizes), like=input))
            work = dist.all_to_all_single(rows.view(-1), sent, [out.numel()] * ranks, sizes, group=group, async_op=True)
        pieces.append(_Piece(work, rows, out, divisor, across, scratch))
        scratch.start(pieces[-1])
    return pieces
