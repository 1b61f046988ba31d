"""One rank's part of a save. A thread writes live state, or a copy during training.

Every rank writes its shard and then a record next to the shard: `.done`, with the shard's entry of the manifest. The
first rank's thread then waits for the records of all and publishes the checkpoint. The ranks exchange failures.
"""

from __future__ import annotations

import json
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from mega_rl import disk
from mega_rl.checkpoint.format.manifest import WholeTensor
from mega_rl.checkpoint.format.shards import PieceSpec, ShardRecord, coverage_fault, order, write_shard
from mega_rl.converters.safetensors.reader import DTYPE_NAMES, as_bytes
from mega_rl.disk import SaveError
from mega_rl.parallel.accelerator.base import HostMemory
from mega_rl.parallel.boxes import Piece
from mega_rl.processes import Running

FIRST_WAIT_S, LONGEST_WAIT_S = 0.005, 0.25  # between two polls for records
ALIGNMENT = 64  # bytes of a cache line, more than any dtype needs
STOP_S = 10.0  # for a stopped thread; a thread that waits for a dead disk cannot end


class SaveJob(NamedTuple):
    """One rank's part of a save."""

    folder: Path  # the temporary folder
    shard: str  # file name of this rank's shard
    timeout_s: float
    shards: Sequence[str] = ()  # on the first rank: file names of all shards
    # On the first rank: publishes all tensors and shards, and returns problems that did not harm the checkpoint.
    publish: Callable[[dict[str, WholeTensor], tuple[ShardRecord, ...]], list[str]] | None = None


class Writer:
    """A thread that runs one job at a time."""

    def __init__(self, *, copies: bool) -> None:
        """copies: the pieces of a job may change once `start` returns."""
        self._copies = copies
        self._staging: HostMemory | None = None
        self._given_up = threading.Event()
        self._work: Running[list[str]] | None = None

    def start(self, job: SaveJob, pieces: Sequence[Piece]) -> None:
        """Start a job over these pieces. Raises SaveError without memory for their copies."""
        given_up = self._given_up = threading.Event()
        pieces = self._copied(pieces) if self._copies else pieces
        self._work = Running(lambda: perform(job, pieces, given_up=given_up.is_set), name="checkpoint")

    def wait(self, timeout_s: float) -> list[str] | None:
        """Return the job's harmless problems, None if not done in time. Raises SaveError."""
        if self._work is None or self._work.wait(timeout_s):
            return None
        error = self._work.error
        if error is not None and not isinstance(error, SaveError):  # any error must reach the waiting rank
            error = SaveError(f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        return self._work.result

    def stop(self) -> None:
        """Abandon the job without publishing; wait at most `STOP_S` for a thread hanging in the disk."""
        self._given_up.set()
        if self._work is not None and self._work.wait(STOP_S):
            self._staging = None  # the thread may still read it

    def close(self) -> None:
        """Abandon a job and free the memory; may be called twice."""
        self.stop()
        self._free()

    def _free(self) -> None:
        if self._staging is not None:
            self._staging.release()
        self._staging = None

    def _copied(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Return copies of the pieces in host memory, reused by every save and pinned for CUDA."""
        starts, end = [], 0
        for piece in pieces:
            starts.append(end)
            end += -(-piece.data.nbytes // ALIGNMENT) * ALIGNMENT
        if self._staging is None or self._staging.bytes.nbytes() < end:
            self._free()
            self._staging = _allocated(end)
        memory = torch.empty(0, dtype=torch.uint8).set_(self._staging.bytes)
        copies = []
        for piece, at in zip(pieces, starts, strict=True):
            copy = memory[at : at + piece.data.nbytes].view(piece.data.dtype).view(piece.data.shape)
            copies.append(replace(piece, data=copy.copy_(piece.data.detach(), non_blocking=self._staging.is_pinned)))
        if self._staging.is_pinned:
            torch.cuda.current_stream().synchronize()
        return copies


def _allocated(nbytes: int) -> HostMemory:
    """Return host memory with allocated pages: a write to overcommitted pages would kill the process."""
    size = max(nbytes, mmap.PAGESIZE)
    descriptor = os.memfd_create("checkpoint staging")
    try:
        os.posix_fallocate(descriptor, 0, size)
        mapped = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    except (OSError, MemoryError) as error:
        raise SaveError(f"no {nbytes} bytes of host memory to copy the state to: {error}") from error
    finally:
        os.close(descriptor)
    return HostMemory(mapped, purpose="checkpoints on their way to disk")


def perform(job: SaveJob, pieces: Sequence[Piece], *, given_up: Callable[[], bool]) -> list[str]:
    """Write the shard and its record; the first rank then waits for all records and publishes.

    Returns problems that did not harm the checkpoint. Raises SaveError.
    """
    deadline = time.monotonic() + job.timeout_s
    if pieces:
        record, layout = write_part(job.folder / job.shard, pieces, given_up=given_up)
        # Atomically and last: the first rank may then rename the folder.
        hidden = _record(job.folder, f".{job.shard}")
        disk.write_text(hidden, json.dumps({"shard": record.to_json(), "layout": layout}))
        disk.rename(hidden, _record(job.folder, job.shard))
    if job.publish is None:
        return []
    parts = [json.loads(text) for text in _wait_for_records(job, deadline, given_up)]
    records = tuple(ShardRecord.from_json(part["shard"], job.folder) for part in parts)
    tensors = merge_layouts(part["layout"] for part in parts)
    for name in job.shards:
        disk.remove_file(_record(job.folder, name))
    if given_up():
        raise SaveError("given up")
    return job.publish(tensors, records)


def write_part(
    path: Path, pieces: Sequence[Piece], *, given_up: Callable[[], bool] = lambda: False
) -> tuple[ShardRecord, str]:
    """Write a rank's shard; return its record and its layout, a text for `merge_layouts`. Raises SaveError."""
    specs = [PieceSpec(p.name, DTYPE_NAMES[p.data.dtype], p.box.offset, p.box.shape) for p in pieces]
    chosen = order(specs)
    pieces, specs = [pieces[i] for i in chosen], [specs[i] for i in chosen]
    record = write_shard(path, specs, _views(pieces, given_up))
    return record, json.dumps({"pieces": specs, "wholes": [piece.global_shape for piece in pieces]})


def _views(pieces: Sequence[Piece], given_up: Callable[[], bool]) -> Iterator[memoryview]:
    """Yield each piece's bytes: contiguous host memory in place, others in one reused buffer."""
    strided = [piece.data for piece in pieces if not _is_plain(piece.data)]
    size = max((tensor.nbytes for tensor in strided), default=0)
    buffer = torch.empty(size, dtype=torch.uint8, pin_memory=any(piece.data.is_cuda for piece in pieces))
    for piece in pieces:
        tensor = piece.data.detach()
        if given_up():
            raise SaveError("given up")
        if not _is_plain(tensor):
            tensor = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        # A contiguous tensor of one element may have any stride.
        yield as_bytes(tensor.as_strided((tensor.numel(),), (1,))).data if tensor.numel() else memoryview(b"")


def _is_plain(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous()


def merge_layouts(texts: Iterable[str]) -> dict[str, WholeTensor]:
    """Return the tensors of a checkpoint from the layouts of all ranks' shards.

    Raises SaveError where the pieces do not cover every tensor exactly once.
    """
    tensors: dict[str, WholeTensor] = {}
    pieces: dict[str, list[PieceSpec]] = {}
    for text in texts:
        layout = json.loads(text)
        for (name, dtype, offset, shape), global_shape in zip(layout["pieces"], layout["wholes"], strict=True):
            whole = WholeTensor(dtype, tuple(global_shape))
            if tensors.setdefault(name, whole) != whole:
                raise SaveError(f"{name}: is {tensors[name]} on one rank and {whole} on another")
            pieces.setdefault(name, []).append(PieceSpec(name, dtype, tuple(offset), tuple(shape)))
    for name, whole in tensors.items():
        if fault := coverage_fault(pieces[name], whole.shape):
            raise SaveError(f"{name} {list(whole.shape)}: {fault}; this is a bug")
    return tensors


def _wait_for_records(job: SaveJob, deadline: float, given_up: Callable[[], bool]) -> list[str]:
    """Return the texts of all shards' `.done`. Raises SaveError when they are late."""
    wait_s = FIRST_WAIT_S
    while missing := [shard for shard in job.shards if not _record(job.folder, shard).exists()]:
        if given_up():
            raise SaveError("given up")
        if time.monotonic() > deadline:
            raise SaveError(f"waited {job.timeout_s:g} s for {', '.join(missing)}, which other ranks write")
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, LONGEST_WAIT_S)
    return [_record(job.folder, shard).read_text(encoding="utf-8") for shard in job.shards]


def _record(folder: Path, shard: str) -> Path:
    return (folder / shard).with_suffix(".done")
