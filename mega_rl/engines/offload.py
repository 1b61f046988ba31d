"""Moving tensors off the accelerator and back without breaking the views into them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class StorageOffload:
    """Host copies of a set of storages whose device memory has been given back.

    Parameters are views into Megatron-Core's buffers, and FP32 main parameters may be views of the same memory, so
    replacing tensors (as upstream's `offload_to_cpu` does) would cut them apart. Here each storage is copied to the
    host once, shrunk to zero bytes, and later grown and filled again: every view stays what it was.
    """

    def __init__(self) -> None:
        self._copies: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []

    def offload(self, tensors: Iterable[Tensor]) -> int:
        """Empty the storages of `tensors`; returns the bytes given back.

        Raises:
            RuntimeError: something is offloaded already.
        """
        if self._copies:
            raise RuntimeError("offload() called twice: call onload() first")
        storages = {s.data_ptr(): s for s in (t.untyped_storage() for t in tensors) if s.nbytes()}
        for storage in storages.values():
            self._copies.append((storage, storage.cpu() if storage.device.type != "cpu" else storage.clone()))
            storage.resize_(0)
        return sum(copy.nbytes() for _, copy in self._copies)

    def onload(self) -> None:
        """Give every storage its memory and bytes back."""
        for storage, copy in self._copies:
            storage.resize_(copy.nbytes())
            storage.copy_(copy, non_blocking=False)
        self._copies.clear()
