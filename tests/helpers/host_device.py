"""A stand-in for the device of `CudaIpcTransport`: memory of the host that other processes open by a path.

It counts as torch does for CUDA (torch/csrc/CudaIPCTypes.cpp): sharing makes a counter of 1, the receiver counts down
once it has dropped the memory, and a buffer whose counter is not 0 keeps its memory for ever, whoever frees it.
"""

from __future__ import annotations

import mmap
import os
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class CountedFile:
    """The bytes of a buffer; unpickled, a uint8 tensor [nbytes] that counts down when it ends."""

    path: str
    nbytes: int
    counter: str

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened, (self.path, self.nbytes, self.counter)


def _opened(path: str, nbytes: int, counter: str) -> Tensor:
    tensor = torch.from_file(path, shared=False, size=nbytes, dtype=torch.uint8)
    with open(counter, "r+b") as file:
        weakref.finalize(tensor, _count_down, mmap.mmap(file.fileno(), 1))
    return tensor


def _count_down(counter: mmap.mmap) -> None:
    counter[0] = (counter[0] - 1) % 256


class HostDevice:
    """`cuda_ipc.CudaDevice`; `most` is the largest number of buffers that were alive at once, `peak` their bytes."""

    def __init__(self) -> None:
        self.alive = self.most = self.bytes = self.peak = 0
        self._paths: dict[int, str] = {}  # of each buffer, by the place of its first byte
        self._counters: list[mmap.mmap] = []  # of each handle

    @property
    def held(self) -> int:
        """Return how many shared buffers keep their memory: not opened, not dropped, or opened twice."""
        return sum(counter[0] != 0 for counter in self._counters)

    def memory(self, nbytes: int) -> Tensor:
        descriptor = os.memfd_create("buffer", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, nbytes)
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
        tensor = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
        self._paths[tensor.data_ptr()] = path
        self.alive += 1
        self.bytes += nbytes
        self.most, self.peak = max(self.most, self.alive), max(self.peak, self.bytes)
        weakref.finalize(tensor, self._free, descriptor, nbytes)
        return tensor

    def handle(self, data: Tensor) -> CountedFile:
        descriptor = os.memfd_create("counter", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, 1)
        counter = mmap.mmap(descriptor, 1)
        counter[0] = 1
        self._counters.append(counter)
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
        return CountedFile(self._paths[data.data_ptr()], data.numel(), path)

    def close(self) -> None:
        pass

    def _free(self, descriptor: int, nbytes: int) -> None:
        self.alive -= 1
        self.bytes -= nbytes
        os.close(descriptor)
