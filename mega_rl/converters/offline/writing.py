"""Running a conversion: the target is complete or not there.

Tensors stream from checkpoints into new files, a bounded number of bytes at a time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from mega_rl.converters.live.adapters import add
from mega_rl.converters.live.copying import in_threads
from mega_rl.converters.offline.checkpoint import WeightFiles, fill_windows, is_plain
from mega_rl.converters.offline.slabs import Slab
from mega_rl.converters.offline.torch_dist import ChunkFile, Written
from mega_rl.converters.plan.compose import ColumnRange, rows_of
from mega_rl.converters.safetensors.header import matrix_shape
from mega_rl.converters.safetensors.output_folder import output_folder, require_space
from mega_rl.converters.safetensors.writer import SafetensorsFile, TensorSpec, plan_shards
from mega_rl.errors import UserError
from mega_rl.tracking import progress

logger = logging.getLogger(__name__)

# Bytes of tensors in memory at a time over all threads; a larger tensor is there with no other. Reading also stages at
# most copying.STAGING_BYTES per thread.
BUFFER_BYTES = 64 << 20
# Rows that are made and written together. Tensors whose source is transposed are made whole instead.
PIECE_BYTES = 8 << 20
# Room for names, sizes and extra states.
OVERHEAD_BYTES = 1 << 20


@dataclass(frozen=True)
class Report:
    """Result of a conversion."""

    num_tensors: int = 0  # written
    num_files: int = 0
    num_bytes: int = 0  # tensors written
    seconds: float = 0.0
    ignored: tuple[str, ...] = ()  # tensors of the source left out
    absent: tuple[str, ...] = ()  # parameters of the model that neither source nor target has
    kept: tuple[str, ...] = ()  # tensors taken from the reference
    config_changes: tuple[str, ...] = ()  # keys of config.json that differ from the source's


@dataclass(frozen=True)
class Output:
    """A tensor to write and how it is made of a checkpoint's tensors."""

    spec: TensorSpec
    windows: tuple[ColumnRange, ...]
    source: WeightFiles
    slab: Slab | None = None  # its place in a distributed checkpoint
    adapter: Merge | None = None  # added to its values

    def read(self) -> Tensor:
        """Return the whole tensor."""
        return self.read_rows(0, matrix_shape(self.spec.shape)[0]).view(self.spec.shape)

    def read_rows(self, low: int, high: int, buffer: Tensor | None = None) -> Tensor:
        """Return rows [low, high) as [rows, columns]; buffer: [bytes] uint8 for them."""
        rows, columns, dtype = high - low, matrix_shape(self.spec.shape)[1], self.spec.dtype
        matrix = torch.empty(rows, columns, dtype=dtype) if buffer is None else buffer.view(dtype).view(rows, columns)
        fill_windows(matrix, [rows_of(window, low, high) for window in self.windows], self.source)
        if self.adapter is not None:
            a, b, scale = self.adapter
            matrix.copy_(add(matrix, a.read(), b.read_rows(low, high), scale))
        return matrix


class Merge(NamedTuple):
    """A low-rank adapter that is merged into a weight as it is written."""

    a: Output
    b: Output
    scale: float


class OutputFile(NamedTuple):
    """A file of the target and the tensors in it."""

    name: str
    outputs: list[Output]

    @property
    def nbytes(self) -> int:
        """Return the bytes of its tensors."""
        return sum(output.spec.nbytes for output in self.outputs)


@dataclass
class Conversion:
    """A planned conversion: the files to write, how the folder is completed, and what to report."""

    files: list[OutputFile]
    complete: Callable[[Path, Sequence[Written]], None]
    readers: Sequence[WeightFiles]
    report: Report


def convert(
    prepare: Callable[[], Conversion],
    target: str | Path,
    inputs: Sequence[str | Path | None],
    *,
    overwrite: bool,
    jobs: int | None,
    label: str,
) -> Report:
    """Plan a conversion and write its files; the target appears as a whole. jobs: threads."""
    start = perf_counter()
    for path in inputs:
        if path is not None:
            _check_apart(Path(target), Path(path))
    job = prepare()
    num_bytes = sum(file.nbytes for file in job.files)
    with ExitStack() as stack:
        for reader in job.readers:
            stack.enter_context(reader)
        work = stack.enter_context(output_folder(target, overwrite=overwrite))
        require_space(work, num_bytes + OVERHEAD_BYTES)
        files = sorted(job.files, key=lambda file: -file.nbytes)
        job.complete(work, _write_files(work, files, jobs, label))
    report = replace(
        job.report,
        num_tensors=sum(len(file.outputs) for file in job.files),
        num_files=len(job.files),
        num_bytes=num_bytes,
        seconds=perf_counter() - start,
    )
    logger.info("wrote %s: %d tensors, %d bytes, %.1f s", target, report.num_tensors, num_bytes, report.seconds)
    return report


def _check_apart(target: Path, source: Path) -> None:
    """Raise UserError when one of two folders is, or lies in, the other."""
    a, b = target.resolve(), source.resolve()
    if a == b or a in b.parents or b in a.parents:
        raise UserError(f"{target}: the target and {source} are inside one another; choose another directory")


def group_outputs(outputs: Sequence[Output], file_bytes: int, name: Callable[[int, int], str]) -> list[OutputFile]:
    """Return outputs in files of at most `file_bytes`; `name(i, n)` names file i of n."""
    by_name = {output.spec.name: output for output in outputs}
    groups = plan_shards([output.spec for output in outputs], file_bytes)
    return [OutputFile(name(i, len(groups)), [by_name[spec.name] for spec in group]) for i, group in enumerate(groups)]


@dataclass
class _Meter:
    """Bound on the bytes in memory, and count of those written."""

    advance: Callable[[int], object]
    _used: int = 0
    _changed: threading.Condition = field(default_factory=threading.Condition)

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
        self.advance(num_bytes)


def _write_files(folder: Path, files: Sequence[OutputFile], threads: int | None, label: str) -> list[Written]:
    """Write files and return where the chunks of a distributed checkpoint are."""
    written: list[Written] = []
    with progress.phase(label, total=sum(file.nbytes for file in files), unit="B") as phase:
        meter = _Meter(phase.advance)
        if files and files[0].outputs[0].slab is not None:
            in_threads(files, lambda file: written.extend(_write_chunks(folder, file, meter)), threads=threads)
        else:
            for file in files:
                _write_safetensors(folder, file, meter, threads)
    return written


def _write_safetensors(folder: Path, file: OutputFile, meter: _Meter, threads: int | None) -> None:
    with SafetensorsFile(folder / file.name, [output.spec for output in file.outputs]) as target:
        pieces = [(output, low, high) for output in file.outputs for low, high in _pieces(output)]
        buffers = threading.local()

        def work(piece: tuple[Output, int, int]) -> None:
            output, low, high = piece
            columns = matrix_shape(output.spec.shape)[1]
            nbytes = (high - low) * columns * output.spec.dtype.itemsize
            with meter.room(nbytes):
                target.write_rows(output.spec.name, low, [output.read_rows(low, high, _buffer(buffers, nbytes))])

        in_threads(pieces, work, threads=threads)


def _buffer(buffers: threading.local, num_bytes: int) -> Tensor:
    """Return [num_bytes] uint8 of this thread's buffer, which is made once."""
    if num_bytes > PIECE_BYTES:
        return torch.empty(num_bytes, dtype=torch.uint8)
    if not hasattr(buffers, "data"):
        buffers.data = torch.empty(PIECE_BYTES, dtype=torch.uint8)
    data: Tensor = buffers.data[:num_bytes]
    return data


def _pieces(output: Output) -> Iterator[tuple[int, int]]:
    """Yield the row intervals of a tensor that are made and written one by one."""
    rows, columns = matrix_shape(output.spec.shape)
    step = max(1, PIECE_BYTES // max(1, columns * output.spec.dtype.itemsize))
    if not all(is_plain(window) for window in output.windows):
        step = max(1, rows)
    for low in range(0, rows, step):
        yield low, min(low + step, rows)


def _write_chunks(folder: Path, file: OutputFile, meter: _Meter) -> list[Written]:
    """Write a file of a distributed checkpoint, one whole parameter after the other."""
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
    return written
