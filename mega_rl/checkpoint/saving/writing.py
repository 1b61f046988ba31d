"""Writers of a rank's part of a save: a thread, or a background process."""

from __future__ import annotations

import logging
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from mega_rl.checkpoint.format.shards import PieceSpec, order
from mega_rl.checkpoint.saving.job import JobPiece, SaveJob, perform
from mega_rl.checkpoint.saving.writer import WriterProcess
from mega_rl.converters.safetensors.reader import DTYPE_NAMES, as_bytes
from mega_rl.disk import SaveError
from mega_rl.parallel.accelerator.transfer import HostMemory
from mega_rl.processes import Running
from mega_rl.types import Piece

log = logging.getLogger(__name__)

ALIGNMENT = 64  # bytes of a cache line, more than any dtype needs
STOP_S = 10.0  # for a stopped thread; a thread that waits for a dead disk cannot end


class Writing(Protocol):
    """A writer of one job at a time."""

    def start(self, job: SaveJob, pieces: Sequence[Piece]) -> None:
        """Start a job over these pieces; with a background writer they may change once this returns.

        Raises:
            SaveError: the job could not start.
        """
        ...

    def wait(self, timeout_s: float) -> list[str] | None:
        """Return the job's harmless problems, None if not done in time. Raises SaveError."""
        ...

    def stop(self) -> None:
        """Abandon the job, so that it publishes nothing; `start` may follow."""
        ...

    def close(self) -> None:
        """Release the resources kept from job to job; may be called twice."""
        ...


class InlineWriter:
    """Writer of the live state, in a thread, so that ranks can meet meanwhile."""

    def __init__(self) -> None:
        self._given_up = threading.Event()
        self._work: Running[list[str]] | None = None

    def start(self, job: SaveJob, pieces: Sequence[Piece]) -> None:
        """Start a job; the pieces may not change until it is done."""
        ordered, places, _ = plan(pieces)
        job, data, given_up = job._replace(pieces=tuple(places)), direct(ordered), threading.Event()
        self._given_up = given_up
        self._work = Running(lambda: perform(job, data, given_up=given_up.is_set), name="checkpoint")

    def wait(self, timeout_s: float) -> list[str] | None:
        if self._work is None or self._work.wait(timeout_s):
            return None
        error = self._work.error
        if error is not None and not isinstance(error, SaveError):  # any error must reach the waiting rank
            error = SaveError(f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        return self._work.result

    def stop(self) -> None:
        """Abandon the job; waits at most `STOP_S` for a thread that hangs in the disk."""
        self._given_up.set()
        if self._work is not None:
            self._work.wait(STOP_S)

    def close(self) -> None:
        """Do nothing: an inline writer holds no resources."""


class BackgroundWriter:
    """Writer of a copy of the state, in a process that the first job starts."""

    def __init__(self) -> None:
        self._staging: Staging | None = None
        self._process: WriterProcess | None = None

    @property
    def pid(self) -> int | None:
        """Return the process id of the writer, None before the first job."""
        return None if self._process is None else self._process.pid

    def start(self, job: SaveJob, pieces: Sequence[Piece]) -> None:
        """Copy the job's data to staging memory and start writing it."""
        if self._staging is None:
            self._staging = Staging()
        ordered, places, nbytes = plan(pieces)
        self._staging.copy(ordered, places, nbytes)
        if self._process is not None and not self._process.alive:
            log.warning("the writer (process %d) ended between two saves: starting another", self._process.pid)
            self.stop()
        if self._process is None:
            self._process = WriterProcess(self._staging.descriptor)
        self._process.start(job._replace(pieces=tuple(places)), memory_bytes=nbytes)

    def wait(self, timeout_s: float) -> list[str] | None:
        return None if self._process is None else self._process.wait(timeout_s)

    def stop(self) -> None:
        """End the process; the next job gets another."""
        process, self._process = self._process, None
        if process is not None:
            process.stop()

    def close(self) -> None:
        """End the process and free the memory."""
        self.stop()
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.close()


class Staging:
    """Anonymous memory that the writer process maps too, pinned for CUDA so that copies run concurrently.

    Kept from save to save, since its page faults cost as much as a copy, and grown when a save needs more.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("checkpoint staging")
        self._memory: HostMemory | None = None

    def copy(self, pieces: Sequence[Piece], places: Sequence[JobPiece], nbytes: int) -> None:
        """Copy every piece to its place; returns when all copies are complete.

        Raises:
            SaveError: the host has not enough memory.
        """
        if self._memory is None or self._memory.bytes.nbytes() < nbytes:
            self._release()
            size = max(nbytes, mmap.PAGESIZE)
            try:
                # Allocates the pages now: overcommitted memory would kill the process when it is written.
                os.posix_fallocate(self.descriptor, 0, size)
                mapped = mmap.mmap(self.descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            except (OSError, MemoryError) as error:
                reason = error.strerror if isinstance(error, OSError) else "out of memory"
                raise SaveError(f"no {nbytes} bytes of host memory to copy the state to: {reason}") from error
            self._memory = HostMemory(mapped, purpose="checkpoints on their way to disk")
        memory = self._memory
        buffer = torch.empty(0, dtype=torch.uint8).set_(memory.bytes)
        for piece, place in zip(pieces, places, strict=True):
            if piece.data.numel():
                target = buffer[place.at : place.at + piece.data.nbytes].view(piece.data.dtype)
                target.view(piece.data.shape).copy_(piece.data.detach(), non_blocking=memory.is_pinned)
        if memory.is_pinned:
            torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        """Free the memory; may be called twice."""
        self._release()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def _release(self) -> None:
        """Drop the mapping, which ends with its last view."""
        if self._memory is not None:
            self._memory.release()
        self._memory = None


def plan(pieces: Sequence[Piece]) -> tuple[list[Piece], list[JobPiece], int]:
    """Return (pieces in file order, their places in staging memory, bytes of the memory)."""
    specs = [PieceSpec(p.name, DTYPE_NAMES[p.data.dtype], p.box.offset, p.box.shape) for p in pieces]
    chosen = order(specs)
    laid_out, end = [], 0
    for index in chosen:
        laid_out.append(JobPiece(specs[index], pieces[index].global_shape, at=end))
        end += -(-pieces[index].data.nbytes // ALIGNMENT) * ALIGNMENT
    return [pieces[index] for index in chosen], laid_out, end


def direct(pieces: Sequence[Piece]) -> Callable[[int], memoryview]:
    """Return a function from a piece's index to its bytes, valid until its next call.

    Views contiguous host memory in place; copies other pieces into a buffer of the largest one's size.
    """
    strided = [piece.data for piece in pieces if not _is_plain(piece.data)]
    size = max((tensor.nbytes for tensor in strided), default=0)
    buffer = torch.empty(size, dtype=torch.uint8, pin_memory=any(piece.data.is_cuda for piece in pieces))

    def data(index: int) -> memoryview:
        tensor = pieces[index].data.detach()
        if not tensor.numel():
            return memoryview(b"")
        if not _is_plain(tensor):
            target = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            tensor = target.copy_(tensor)
        # A contiguous tensor of one element may have any stride.
        return as_bytes(tensor.as_strided((tensor.numel(),), (1,))).data

    return data


def _is_plain(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous()
