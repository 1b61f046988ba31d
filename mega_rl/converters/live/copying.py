"""Write parameters from a checkpoint's tensors by the copies of a plan, with several threads.

It serves live models, offline conversion and any source of tensors that implements `BlockReader`. Whole rows of equal
dtype for a parameter on the CPU are read straight into the parameter; everything else passes through a small staging
buffer per thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from threading import local
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from mega_rl.converters.plan.blocks import Copy
from mega_rl.converters.safetensors.header import matrix_shape
from mega_rl.converters.safetensors.reader import TensorInfo
from mega_rl.errors import UserError
from mega_rl.tracking import progress

# Staging buffer of one thread. Eight threads together stay below 64 MiB.
STAGING_BYTES = 4 << 20
# Bytes that one thread reads at a time: all threads end together, and the number of calls does not matter.
PIECE_BYTES = 16 << 20

Task = TypeVar("Task")
Made = TypeVar("Made")


class ShapeAndDtype(NamedTuple):
    """A tensor or parameter of the whole model."""

    shape: tuple[int, ...]
    dtype: torch.dtype


TensorLike: TypeAlias = TensorInfo | ShapeAndDtype


class BlockReader(Protocol):
    """A thread-safe source of tensors by name, each seen as a matrix (`matrix_shape`)."""

    @property
    def tensors(self) -> Mapping[str, TensorLike]:
        """Return every tensor of the checkpoint by name."""

    def position(self, name: str) -> tuple[str, int]:
        """Return (file, offset): reading in this order runs forwards through the files."""

    def read_block(self, name: str, rows: tuple[int, int], cols: tuple[int, int]) -> Tensor:
        """Return a rectangle, rows and columns both (low, high), as a new CPU tensor."""

    def read_into(self, name: str, row: int, cols: tuple[int, int], targets: Sequence[Tensor]) -> None:
        """Read rows from `row` on, columns [low, high) of them, into `targets` one after the other.

        Targets are [rows_i, high - low] of the tensor's dtype on the CPU, each row contiguous.
        """
        for target in targets:
            target.copy_(self.read_block(name, (row, row + len(target)), cols))
            row += len(target)


def blocks_of(tensor: TensorLike) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield (rows, columns) of a tensor's blocks: whole rows, each block of bounded size."""
    rows, cols = matrix_shape(tensor.shape)
    step = max(1, PIECE_BYTES // max(1, cols * tensor.dtype.itemsize))
    return (((low, min(low + step, rows)), (0, cols)) for low in range(0, rows, step))


# A whole parameter [rows, cols], and copies into it that read consecutive rows of the same columns; one if transposed.
FillStep = tuple[Tensor, tuple[Copy, ...]]


def fill(target: Tensor, copies: Sequence[Copy], reader: BlockReader) -> int:
    """Write one parameter, of any device and dtype, and return the number of elements written."""
    return fill_all([(target, copies)], reader, threads=1)


def fill_all(jobs: Iterable[tuple[Tensor, Sequence[Copy]]], reader: BlockReader, *, threads: int | None = None) -> int:
    """Write parameters and return the number of elements written, zero rows included.

    Targets are contiguous; values are cast to their dtype. Reads run forwards through the files. `threads` None: a
    rank's share of the node's cores, at most 8. The first error of any thread is raised when all have stopped;
    parameters are then partly written. Raises UserError for 8-bit values without scales, which no cast can turn into
    weights.
    """
    pieces: list[FillStep] = []
    written: list[int] = []
    for target, copies in jobs:
        matrix = target.detach().view(matrix_shape(tuple(target.shape)))
        written += (rectangle(matrix, copy).zero_().numel() for copy in copies if copy.hf_name is None)
        for run in _runs(copies):
            source = reader.tensors[_name(run[0])].dtype
            if source.itemsize == 1 and source != matrix.dtype:
                raise UserError(f"{_name(run[0])}: {source} without scales cannot become {matrix.dtype}")
            pieces += ((matrix, part) for part in _split(run, PIECE_BYTES // source.itemsize))
    pieces.sort(key=lambda piece: (*reader.position(_name(piece[1][0])), piece[1][0].src_row))
    buffers = local()

    def nbytes(piece: FillStep) -> int:
        itemsize = reader.tensors[_name(piece[1][0])].dtype.itemsize
        return itemsize * sum(copy.rows * copy.cols for copy in piece[1])

    advance = progress.counter(sum(map(nbytes, pieces)))

    def read(piece: FillStep) -> None:
        written.append(_read(piece, reader, buffers))
        advance(nbytes(piece))

    in_threads(pieces, read, threads=threads)
    return sum(written)


def in_threads(tasks: Sequence[Task], work: Callable[[Task], Made], *, threads: int | None = None) -> list[Made]:
    """Return `work` on every task; the first error is raised when all threads have stopped.

    `threads` None: this rank's share of the node's cores, at most 8.
    """
    if threads is None:
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # torchrun sets it
        threads = max(1, min(8, len(os.sched_getaffinity(0)) // ranks))
    if min(threads, len(tasks)) <= 1:
        return [work(task) for task in tasks]
    with ThreadPoolExecutor(threads, thread_name_prefix="threads of a rank") as pool:
        futures = [pool.submit(work, task) for task in tasks]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return [future.result() for future in futures]


def rectangle(matrix: Tensor, copy: Copy) -> Tensor:
    """Return the part of a parameter that a copy writes."""
    columns = slice(copy.dst_col, copy.dst_col + (copy.cols - 1) * copy.dst_step + 1, copy.dst_step)
    return matrix[copy.dst_row : copy.dst_row + copy.rows, columns]


def _name(copy: Copy) -> str:
    assert copy.hf_name is not None
    return copy.hf_name


def _runs(copies: Iterable[Copy]) -> list[list[Copy]]:
    """Return the copies that read, grouped by consecutive rows of one tensor's columns."""
    read = [copy for copy in copies if copy.hf_name is not None]
    runs = [[copy] for copy in read if copy.transposed]
    straight = (copy for copy in read if not copy.transposed)
    before: Copy | None = None
    for copy in sorted(straight, key=lambda c: (c.hf_name, c.src_col, c.cols, c.src_row)):
        same = before is not None and (before.hf_name, before.src_col, before.cols) == (
            copy.hf_name, copy.src_col, copy.cols
        )  # fmt: skip
        if before is not None and same and before.src_row + before.rows == copy.src_row:
            runs[-1].append(copy)
        else:
            runs.append([copy])
        before = copy
    return runs


def _split(run: Sequence[Copy], numel: int) -> Iterator[tuple[Copy, ...]]:
    """Yield a run in parts of at most `numel` elements, or of one row."""
    if run[0].transposed:
        (copy,) = run
        step = max(1, numel // copy.src_shape[1])
        for low in range(0, copy.cols, step):
            cols = min(step, copy.cols - low)
            dst_col = copy.dst_col + low * copy.dst_step
            yield (copy._replace(src_row=copy.src_row + low, dst_col=dst_col, cols=cols),)
        return
    step = max(1, numel // max(1, run[0].cols))
    part: list[Copy] = []
    room = step
    for copy in run:
        low = 0
        while low < copy.rows:
            rows = min(room, copy.rows - low)
            part.append(copy._replace(src_row=copy.src_row + low, dst_row=copy.dst_row + low, rows=rows))
            low, room = low + rows, room - rows
            if room == 0:
                yield tuple(part)
                part, room = [], step
    if part:
        yield tuple(part)


def _read(piece: FillStep, reader: BlockReader, buffers: local) -> int:
    """Read one piece, straight or through this thread's staging buffer; return the number of elements written."""
    matrix, copies = piece
    first, name = copies[0], _name(copies[0])
    dtype = reader.tensors[name].dtype
    with torch.no_grad():
        if matrix.device.type == "cpu" and dtype == matrix.dtype and not first.transposed:
            targets = [rectangle(matrix, copy) for copy in copies]
            reader.read_into(name, first.src_row, (first.src_col, first.src_col + first.cols), targets)
            return sum(target.numel() for target in targets)
        written = 0
        for (copy,) in (part for c in copies for part in _split([c], STAGING_BYTES // dtype.itemsize)):
            height, width = copy.src_shape
            block = _staging(buffers, height * width * dtype.itemsize, matrix.device).view(dtype).view(height, width)
            reader.read_into(name, copy.src_row, (copy.src_col, copy.src_col + width), [block])
            # Casts and transpositions are done where the parameter lives.
            arrived = block.to(matrix.device, non_blocking=True)
            target = rectangle(matrix, copy)
            target.copy_(arrived[:, :: copy.step].T if copy.transposed else arrived)
            written += target.numel()
            if matrix.is_cuda:
                buffers.in_use = torch.cuda.current_stream(matrix.device).record_event()
        return written


def _staging(buffers: local, nbytes: int, device: torch.device) -> Tensor:
    """Return [nbytes] uint8 of this thread's staging buffer, pinned where a GPU reads it."""
    if hasattr(buffers, "in_use"):
        buffers.in_use.synchronize()
    if not hasattr(buffers, "data") or buffers.data.numel() < nbytes:
        buffers.data = torch.empty(max(nbytes, STAGING_BYTES), dtype=torch.uint8, pin_memory=device.type == "cuda")
    data: Tensor = buffers.data
    return data[:nbytes]
