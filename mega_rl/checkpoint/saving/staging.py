"""Bytes of pieces on the host: copied into memory that the writer process maps, or read in place."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mega_rl.accelerator.pinned import HostMemory
from mega_rl.checkpoint.format.shards import PieceSpec, order
from mega_rl.checkpoint.saving.job import JobPiece
from mega_rl.storage.disk import SaveError
from mega_rl.storage.safetensors_reader import DTYPE_NAMES, as_bytes
from mega_rl.types import Piece

ALIGNMENT = 64  # of pieces in the memory: of a cache line, and more than any dtype asks for


def plan(pieces: Sequence[Piece]) -> tuple[list[Piece], list[JobPiece], int]:
    """Return (pieces in the order of the file, the same with their places in staging memory, bytes of the memory)."""
    specs = [PieceSpec(p.name, DTYPE_NAMES[p.data.dtype], p.box.offset, p.box.shape) for p in pieces]
    chosen = order(specs)
    laid_out, end = [], 0
    for index in chosen:
        laid_out.append(JobPiece(specs[index], pieces[index].global_shape, at=end))
        end += -(-pieces[index].data.nbytes // ALIGNMENT) * ALIGNMENT
    return [pieces[index] for index in chosen], laid_out, end


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
            SaveError: the host has no memory for it.
        """
        memory = self._grown(nbytes)
        buffer = torch.empty(0, dtype=torch.uint8).set_(memory.bytes)
        for piece, place in zip(pieces, places, strict=True):
            if piece.data.numel():
                target = buffer[place.at : place.at + piece.data.nbytes].view(piece.data.dtype)
                target.view(piece.data.shape).copy_(piece.data.detach(), non_blocking=memory.is_pinned)
        if memory.is_pinned:
            torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        """Free the memory; may be called twice."""
        self._forget()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def _grown(self, nbytes: int) -> HostMemory:
        if self._memory is None or self._memory.bytes.nbytes() < nbytes:
            self._forget()
            try:
                # Allocates the pages now: overcommitted memory would kill the process when it is written.
                os.posix_fallocate(self.descriptor, 0, max(nbytes, mmap.PAGESIZE))
                mapped = mmap.mmap(
                    self.descriptor, max(nbytes, mmap.PAGESIZE), flags=mmap.MAP_SHARED | mmap.MAP_POPULATE
                )
            except (OSError, MemoryError) as error:
                reason = error.strerror if isinstance(error, OSError) else "out of memory"
                raise SaveError(f"no {nbytes} bytes of host memory to copy the state to: {reason}") from error
            self._memory = HostMemory(mapped, purpose="checkpoints on their way to disk")
        return self._memory

    def _forget(self) -> None:
        """Drop the mapping, which ends with its last view."""
        if self._memory is not None:
            self._memory.release()
        self._memory = None


def direct(pieces: Sequence[Piece]) -> Callable[[int], memoryview]:
    """Return a function from a piece's index to its bytes, valid until its next call.

    Contiguous host memory is viewed in place; other pieces are copied into a buffer of the largest one's size.
    """
    strided = [p.data.nbytes for p in pieces if not _is_plain(p.data)]
    buffer = torch.empty(max(strided, default=0), dtype=torch.uint8, pin_memory=bool(strided) and _on_cuda(pieces))

    def data(index: int) -> memoryview:
        tensor = pieces[index].data.detach()
        if not tensor.numel():
            return memoryview(b"")
        if not _is_plain(tensor):
            target = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            tensor = target.copy_(tensor)
        # One element counts as contiguous whatever its stride is.
        return as_bytes(tensor.as_strided((tensor.numel(),), (1,))).data

    return data


def _is_plain(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous()


def _on_cuda(pieces: Sequence[Piece]) -> bool:
    return any(piece.data.is_cuda for piece in pieces)
