"""Running a conversion: the target is complete or not there.

Tensors stream from checkpoints into new files, a bounded number of bytes at a time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from mega_rl.converters.live.copying import in_threads
from mega_rl.converters.offline.checkpoint import Output
from mega_rl.converters.offline.torch_dist import Written, new_file, write_chunk
from mega_rl.converters.safetensors.header import matrix_shape
from mega_rl.converters.safetensors.output_folder import output_folder, require_space
from mega_rl.converters.safetensors.writer import CheckpointWriter, TensorSpec, plan_shards
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


def write_folder(
    target: str | Path,
    outputs: Sequence[Output],
    write: Callable[[Path], int],
    report: Report,
    *,
    overwrite: bool,
    label: str,
) -> Report:
    """Write a conversion's folder, which appears as a whole, and complete its report.

    write: fills the folder, and returns the number of files with weights.
    """
    start, num_bytes = perf_counter(), sum(output.spec.nbytes for output in outputs)
    with output_folder(target, overwrite=overwrite) as work:
        require_space(work, num_bytes + OVERHEAD_BYTES)
        with progress.phase(label, total=num_bytes, unit="B"):
            num_files = write(work)
    seconds = perf_counter() - start
    logger.info("wrote %s: %d tensors, %d bytes, %.1f s", target, len(outputs), num_bytes, seconds)
    return replace(report, num_tensors=len(outputs), num_files=num_files, num_bytes=num_bytes, seconds=seconds)


def check_apart(target: str | Path, *sources: str | Path | None) -> None:
    """Raise UserError when the target is, or lies in, one of the sources, or the other way round."""
    for source in (source for source in sources if source is not None):
        a, b = Path(target).resolve(), Path(source).resolve()
        if a == b or a in b.parents or b in a.parents:
            raise UserError(f"{target}: the target and {source} are inside one another; choose another directory")


class _Room:
    """Bound on the bytes of tensors in memory."""

    def __init__(self) -> None:
        self._used = 0
        self._changed = threading.Condition()

    @contextmanager
    def take(self, num_bytes: int) -> Iterator[None]:
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


def write_weights(folder: Path, outputs: Sequence[Output], *, shard_bytes: int, threads: int | None) -> int:
    """Write Hugging Face tensors into files of at most `shard_bytes`; return the number of files."""
    with CheckpointWriter(folder, [output.spec for output in outputs], shard_bytes=shard_bytes) as target:
        pieces = [(output, low, high) for output in outputs for low, high in _pieces(output)]
        buffers, room = threading.local(), _Room()

        def work(piece: tuple[Output, int, int]) -> None:
            output, low, high = piece
            columns = matrix_shape(output.spec.shape)[1]
            nbytes = (high - low) * columns * output.spec.dtype.itemsize
            with room.take(nbytes):
                target.write_rows(output.spec.name, low, [output.read_rows(low, high, _buffer(buffers, nbytes))])

        in_threads(pieces, work, threads=threads)
    return len(target.files)


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
    step = max(1, rows if output.is_transposed else PIECE_BYTES // max(1, columns * output.spec.dtype.itemsize))
    for low in range(0, rows, step):
        yield low, min(low + step, rows)


def write_chunks(folder: Path, outputs: Sequence[Output], *, file_bytes: int, threads: int | None) -> list[Written]:
    """Write parameters, each as a whole, into files of a distributed checkpoint; return where they are."""
    by_name = {output.spec.name: output for output in outputs}
    files = list(enumerate(plan_shards([output.spec for output in outputs], file_bytes)))
    advance, room = progress.counter(sum(output.spec.nbytes for output in outputs)), _Room()
    written: list[Written] = []

    def work(file: tuple[int, list[TensorSpec]]) -> None:
        with new_file(folder / f"__{file[0]}_0.distcp") as target:
            for spec in file[1]:
                output = by_name[spec.name]
                assert output.slab is not None
                with room.take(spec.nbytes):
                    written.append(write_chunk(target, output.slab.key, output.slab.place, output.read()))
                advance(spec.nbytes)

    in_threads(sorted(files, key=lambda file: -sum(spec.nbytes for spec in file[1])), work, threads=threads)
    return written
