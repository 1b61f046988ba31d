"""A stand-in for the device of `CudaIpcTransport`: memory of the host that other processes open by a path."""

from __future__ import annotations

import os
import weakref
from typing import Any

import torch
from torch import Tensor

from mega_rl.rollout.sglang.weights.buckets import MappedFile


class HostDevice:
    """`cuda_ipc.SharedDevice`; `most` is the largest number of buffers that were alive at once."""

    def __init__(self) -> None:
        self.alive = self.most = 0
        self._paths: dict[int, str] = {}  # of each buffer, by the place of its first byte

    def memory(self, nbytes: int) -> Tensor:
        descriptor = os.memfd_create("buffer", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, nbytes)
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
        tensor = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
        self._paths[tensor.data_ptr()] = path
        self.alive += 1
        self.most = max(self.most, self.alive)
        weakref.finalize(tensor, self._free, descriptor)
        return tensor

    def handle(self, data: Tensor) -> Any:
        return {"path": self._paths[data.data_ptr()], "nbytes": data.numel()}

    def opened(self, handle: Any) -> Any:
        return MappedFile(handle["path"], handle["nbytes"])

    def close(self) -> None:
        pass

    def _free(self, descriptor: int) -> None:
        self.alive -= 1
        os.close(descriptor)
