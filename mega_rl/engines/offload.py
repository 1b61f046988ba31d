"""Moving tensors off the accelerator and back without breaking the views into them."""

from __future__ import annotations

import mmap
from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from mega_rl.errors import RunError
from mega_rl.parallel.accelerator.base import HostMemory

_ALIGNMENT = 64  # bytes, of a storage's place on the host: more than any dtype asks for


@dataclass(frozen=True)
class _Copy:
    """Place on the host for the bytes of one storage."""

    storage: StorageWeakRef  # holds the identity, so that no later storage has it, and not the memory
    host: torch.UntypedStorage
    memory: HostMemory  # `host` is a part of it


class StorageOffload:
    """A set of storages whose device memory is given back and taken again.

    Parameters are views into Megatron-Core's buffers, and FP32 main parameters may be views of the same memory, so
    replacing tensors (as upstream's `offload_to_cpu` does) would cut them apart. Here each storage is copied to the
    host, shrunk to zero bytes, and later grown and filled again: every view stays what it was.

    A storage's place on the host is made once and kept, pinned, for as long as the storage is among those that are
    offloaded. It is written only if `changed` was called since its bytes came from there: weights that never change
    travel to the host once. With `discard` nothing is copied, and the storages come back as zeros.
    """

    def __init__(self, device: torch.device, *, discard: bool = False) -> None:
        """
        device: of the storages.
        """
        self._device, self._discard = device, discard
        self._copies: dict[int, _Copy] = {}  # identity of the storage -> copy
        self._off: list[tuple[torch.UntypedStorage, int]] | None = None  # storages and their bytes, while they are off
        self._is_current = False  # whether the host has the bytes of every storage that has a copy
        self._stream: torch.cuda.Stream | None = None

    @property
    def is_off(self) -> bool:
        """Return whether the storages are offloaded."""
        return self._off is not None

    def changed(self) -> None:
        """Note that the storages' values change on the device; the next `offload` copies them."""
        self._is_current = False

    def offload(self, tensors: Iterable[Tensor]) -> int:
        """Empty the storages of `tensors`; returns the bytes given back.

        Raises RuntimeError: something is offloaded already; RunError: the host has no memory for a copy; nothing was
        offloaded.
        """
        if self.is_off:
            raise RuntimeError("offload() called twice: call onload() first")
        storages = storages_of(tensors)
        off = [(storage, storage.nbytes()) for storage in storages.values()]
        if not self._discard:
            self._copy_to_host(storages)
        for storage, _ in off:
            storage.resize_(0)
        self._off, self._is_current = off, True
        return sum(size for _, size in off)

    def onload(self) -> None:
        """Restore every storage's memory and bytes; GPU work waits for the copies, the host does not."""
        off = self._off or []
        for storage, size in off:
            storage.resize_(size)
        if self._discard:
            for storage, _ in off:
                cast(Any, storage).fill_(0)  # torch's stubs lack it
        else:
            with self._beside():
                for storage, _ in off:
                    storage.copy_(self._copies[storage._cdata].host, non_blocking=True)
            if self._stream is not None:
                torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._off = None

    def on_host(self, tensor: Tensor) -> Tensor | None:
        """Return an equally shaped view of an offloaded tensor's host copy; None for any other tensor."""
        copy = self._copies.get(tensor.untyped_storage()._cdata)
        if copy is None or not self.is_off:
            return None
        place = (tensor.storage_offset(), tensor.size(), tensor.stride())
        return torch.empty(0, dtype=tensor.dtype).set_(copy.host, *place)

    def _copy_to_host(self, storages: Mapping[int, torch.UntypedStorage]) -> None:
        """Copy what the host has not got; returns when all of it is there."""
        kept = {key: self._copies[key] for key, s in storages.items() if self._fits(s)}
        fresh = {key: storage for key, storage in storages.items() if key not in kept}
        stale = fresh if self._is_current else storages
        self._copies = kept | _places(fresh)
        with self._beside():
            for key, storage in stale.items():
                self._copies[key].host.copy_(storage, non_blocking=True)
        if self._stream is not None and stale:
            self._stream.synchronize()

    def _fits(self, storage: torch.UntypedStorage) -> bool:
        copy = self._copies.get(storage._cdata)
        return copy is not None and copy.host.nbytes() == storage.nbytes()

    def _beside(self) -> AbstractContextManager[object]:
        """Return a context whose copies run on a separate stream, after the work queued so far."""
        if self._device.type != "cuda":
            return nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)


class PartsOffload:
    """State of a model in parts that leave the device and return one by one.

    Tensors that are on another device already stay there. Memory that parts share goes with the first of them: FP32
    main parameters that are views of the parameters, say, are parameters.
    """

    def __init__(self, parts: Iterable[str], *, device: torch.device, discarded: Collection[str] = ()) -> None:
        """
        discarded: parts whose content is lost: they come back as zeros.
        """
        self._device = device
        self._parts = {part: StorageOffload(device, discard=part in discarded) for part in parts}

    def offload(self, tensors: Mapping[str, Iterable[Tensor]], chosen: Collection[str]) -> int:
        """Empty the storages of the chosen parts; returns the bytes given back.

        `tensors` holds every part, in the order in which shared memory is awarded.

        Raises RuntimeError: a chosen part is off already; RunError: the host has no memory for a copy.
        """
        if any(self.is_off(part) for part in chosen):
            raise RuntimeError("offload() called twice: call onload() first")
        taken: set[int] = set()
        freed = 0
        for part, members in tensors.items():
            here = [tensor for tensor in members if tensor.device.type == self._device.type]
            mine = [tensor for tensor in here if tensor.untyped_storage()._cdata not in taken]
            taken |= {tensor.untyped_storage()._cdata for tensor in mine}
            if part in chosen:
                freed += self._parts[part].offload(mine)
        return freed

    def is_off(self, part: str) -> bool:
        """Return whether a part's memory has been given back."""
        return self._parts[part].is_off

    def onload(self, chosen: Iterable[str]) -> None:
        """Restore the chosen parts on the device; parts that are not offloaded stay as they are."""
        for part in chosen:
            if self.is_off(part):
                self._parts[part].onload()

    def changed(self) -> None:
        """Note that every part gets new values on the device."""
        for part in self._parts.values():
            part.changed()

    def on_host(self, tensor: Tensor) -> Tensor:
        """Return an equally shaped view of an offloaded tensor's host copy, or any other tensor itself."""
        copies = (part.on_host(tensor) for part in self._parts.values())
        return next((copy for copy in copies if copy is not None), tensor)


def storages_of(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """Return each storage of `tensors` that has memory, by its identity."""
    return {s._cdata: s for s in (t.untyped_storage() for t in tensors) if s.nbytes()}


def _places(storages: Mapping[int, torch.UntypedStorage]) -> dict[int, _Copy]:
    """Return a host place per storage, all in one mapping; raises RunError when memory is short."""
    if not storages:
        return {}
    sizes = [-(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT for storage in storages.values()]
    try:
        memory = HostMemory(mmap.mmap(-1, sum(sizes)), purpose="models that leave their device")
    except (OSError, MemoryError) as error:
        raise RunError(
            f"the host has no {sum(sizes) / 1e9:.1f} GB for a model's state that leaves its device: {error}; start "
            "fewer ranks on a host, or keep the models on their devices: engine.resident_roles=all, "
            "rollout.sglang.placement=separate"
        ) from error
    copies, end = {}, 0
    for (key, storage), size in zip(storages.items(), sizes, strict=True):
        copies[key] = _Copy(StorageWeakRef(storage), memory.bytes[end : end + storage.nbytes()], memory)
        end += size
    return copies
