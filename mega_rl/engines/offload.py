"""Moving tensors off the accelerator and back without breaking the views into them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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
        for storage in storages_of(tensors).values():
            self._copies.append((storage, storage.cpu() if storage.device.type != "cpu" else storage.clone()))
            storage.resize_(0)
        return sum(copy.nbytes() for _, copy in self._copies)

    def onload(self) -> None:
        """Give every storage its memory and bytes back."""
        for storage, copy in self._copies:
            storage.resize_(copy.nbytes())
            storage.copy_(copy, non_blocking=False)
        self._copies.clear()


class PartsOffload:
    """The state of a model in parts that leave the device and come back one by one.

    Tensors that are on another device already stay there. Memory that parts share goes with the first of them: FP32
    main parameters that are views of the parameters, say, are parameters.
    """

    def __init__(self, parts: Iterable[str], *, device: torch.device) -> None:
        self._device = device
        self._off: dict[str, StorageOffload | None] = dict.fromkeys(parts)

    def offload(self, tensors: Mapping[str, Iterable[Tensor]], chosen: Iterable[str]) -> int:
        """Empty the storages of the chosen parts; returns the bytes given back.

        `tensors` holds every part, in the order in which shared memory is awarded.

        Raises:
            RuntimeError: a chosen part is off already.
        """
        chosen = list(chosen)
        if any(self._off[part] is not None for part in chosen):
            raise RuntimeError("offload() called twice: call onload() first")
        taken: set[int] = set()
        freed = 0
        for part, members in tensors.items():
            here = [tensor for tensor in members if tensor.device.type == self._device.type]
            mine = [tensor for tensor in here if tensor.untyped_storage()._cdata not in taken]
            taken |= {tensor.untyped_storage()._cdata for tensor in mine}
            if part in chosen:
                self._off[part] = StorageOffload()
                freed += self._take(part).offload(mine)
        return freed

    def is_off(self, part: str) -> bool:
        """Return whether a part's memory has been given back."""
        return self._off[part] is not None

    def onload(self, chosen: Iterable[str]) -> None:
        """Restore the chosen parts on the device; parts that are not offloaded stay as they are."""
        for part in chosen:
            if self._off[part] is not None:
                self._take(part).onload()
                self._off[part] = None

    def _take(self, part: str) -> StorageOffload:
        storages = self._off[part]
        assert storages is not None
        return storages


def chosen_parts(**parts: bool) -> list[str]:
    """Return the names of the parts that are True."""
    return [part for part, chosen in parts.items() if chosen]


def storages_of(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """Return each storage of `tensors` that has memory, by its identity."""
    return {s._cdata: s for s in (t.untyped_storage() for t in tensors) if s.nbytes()}
