"""Streams tensors from checkpoints into new files, a bounded number of bytes at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mega_rl.converters.live.copying import in_threads
from mega_rl.converters.offline.dist_keys import Slab
from mega_rl.converters.offline.formats import WeightFiles, fill_windows, is_plain, rows_of
from mega_rl.converters.offline.torch_dist import ChunkFile, Written
from mega_rl.converters.offline.world import World
from mega_rl.converters.plan.compose import ColumnRange
from mega_rl.storage.safetensors_header import matrix_shape
from mega_rl.storage.safetensors_writer import SafetensorsFile, TensorSpec, plan_shards

# Bytes of tensors in memory at a time over all threads; a tensor that needs more is alone. Reading stages at most
# fill.STAGING_BYTES per thread besides.
BUFFER_BYTES = 64 << 20
# Rows that are made and written together. Tensors whose source is transposed are made whole instead.
PIECE_BYTES = 8 << 20


class ByteProgress(Protocol):
    """Progress of a conversion, reported on rank 0 for the files that it writes."""

    def start(self, total_bytes: int, label: str) -> None:
        """Start a phase: the bytes that it will write, and its label."""

    def advance(self, num_bytes: int) -> None:
        """Report the bytes written since the last call."""


@dataclass(frozen=True)
class Output:
    """A tensor to write and how it is made of a checkpoint's tensors."""

    spec: TensorSpec
    windows: tuple[ColumnRange, ...]
    source: WeightFiles
    slab: Slab | None = None  # its place in a distributed checkpoint


class OutputFile(NamedTuple):
    """A file of the target and the tensors in it."""

    name: str
    outputs: list[Output]

    @property
    def nbytes(self) -> int:
        """Return the bytes of its tensors."""
        return sum(output.spec.nbytes for output in self.outputs)


class _Meter:
    """Bound on the bytes in memory, and count of those written."""

    def __init__(self, progress: ByteProgress | None) -> None:
        self._used, self._changed, self._progress = 0, threading.Condition(), progress

    @contextmanager
    def room(self, num_bytes: int) -> Iterator[None]:
        """Wait until `num_bytes` fit, or nothing else is in memory, and hold them during the block."""
        with self._changed:
            self._changed.wait_for(lambda: self._used == 0 or self._used + num_bytes <= BUFFER_BYTES)
            self._used += num_bytes
        try:
            yield
        finally:
            with self._changed:
                self._used -= num_bytes
                self._changed.notify_all()

    def written(self, num_bytes: int) -> None:
        """Report `num_bytes` more bytes as written."""
        if self._progress is not None:
            with self._changed:
                self._progress.advance(num_bytes)


def group_outputs(outputs: Sequence[Output], file_bytes: int, name: Callable[[int, int], str]) -> list[OutputFile]:
    """Return consecutive outputs in files of at most `file_bytes` bytes; `name(i, n)` is the name of file i of n."""
    by_name = {output.spec.name: output for output in outputs}
    groups = plan_shards([output.spec for output in outputs], file_bytes)
    return [OutputFile(name(i, len(groups)), [by_name[spec.name] for spec in group]) for i, group in enumerate(groups)]


def write_files(
    folder: Path,
    files: Sequence[OutputFile],
    world: World,
    *,
    threads: int | None,
    progress: ByteProgress | None,
    label: str,
) -> list[Written]:
    """Writes this rank's share of the files; of a distributed checkpoint returns where its chunks are."""
    mine = world.share(files, [file.nbytes for file in files])
    meter = _Meter(progress if world.rank == 0 else None)
    if progress is not None and world.rank == 0:
        progress.start(sum(file.nbytes for file in mine), label)
    if files and files[0].outputs[0].slab is not None:
        written: list[Written] = []
        in_threads(mine, lambda file: written.extend(_write_chunks(folder, file, meter)), threads=threads)
        return written
    for file in mine:
        _write_safetensors(folder, file, meter, threads)
    return []


def _write_safetensors(folder: Path, file: OutputFile, meter: _Meter, threads: int | None) -> None:
    with SafetensorsFile(folder / file.name, [output.spec for output in file.outputs]) as target:
        pieces = [(output, low, high) for output in file.outputs for low, high in _pieces(output)]
        buffers = threading.local()

        def work(piece: tuple[Output, int, int]) -> None:
            output, low, high = piece
            columns = matrix_shape(output.spec.shape)[1]
            nbytes = (high - low) * columns * output.spec.dtype.itemsize
            with meter.room(nbytes):
                matrix = _buffer(buffers, nbytes).view(output.spec.dtype).view(high - low, columns)
                fill_windows(matrix, [rows_of(window, low, high) for window in output.windows], output.source)
                target.write_rows(output.spec.name, low, [matrix])
            meter.written(nbytes)

        in_threads(pieces, work, threads=threads)


def _buffer(buffers: threading.local, num_bytes: int) -> Tensor:
    """[num_bytes] uint8: this thread's buffer, made once, because freed memory of threads is not given back."""
    if num_bytes > PIECE_BYTES:
        return torch.empty(num_bytes, dtype=torch.uint8)
    if not hasattr(buffers, "data"):
        buffers.data = torch.empty(PIECE_BYTES, dtype=torch.uint8)
    data: Tensor = buffers.data[:num_bytes]
    return data


def _pieces(output: Output) -> Iterator[tuple[int, int]]:
    """Row intervals of a tensor that are made and written one by one."""
    rows, columns = matrix_shape(output.spec.shape)
    step = max(1, PIECE_BYTES // max(1, columns * output.spec.dtype.itemsize))
    if not all(is_plain(window) for window in output.windows):
        step = max(1, rows)
    for low in range(0, rows, step):
        yield low, min(low + step, rows)


def _write_chunks(folder: Path, file: OutputFile, meter: _Meter) -> list[Written]:
    """A file of a distributed checkpoint, one whole parameter after the other."""
    written = []
    with ChunkFile(folder, file.name) as target:
        for output in file.outputs:
            assert output.slab is not None
            spec = output.spec
            with meter.room(spec.nbytes):
                tensor = torch.empty(spec.shape, dtype=spec.dtype)
                fill_windows(tensor.view(matrix_shape(spec.shape)), output.windows, output.source)
                written.append(target.write(output.slab.key, output.slab.place, tensor))
                del tensor
            meter.written(spec.nbytes)
    return written
