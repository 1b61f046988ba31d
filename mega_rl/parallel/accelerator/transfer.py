"""Copies from the host to a device for which the host does not wait."""

from __future__ import annotations

import contextlib
import logging
import mmap
import weakref

import torch
from torch import Tensor


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the host tensor `tensor` on `device`; on a GPU the copy is queued behind the kernels that are under way.

    A copy from ordinary memory would make the host wait until the device has done all that is queued. Pinned memory
    comes from torch's cache, which gives a block out again when its copy is done.
    """
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


log = logging.getLogger(__name__)


class HostMemory:
    """Mapped host memory, page-locked for CUDA; ordinary memory on a machine without it.

    Not from torch's cache of pinned blocks, which rounds sizes up to powers of two. The mapping is to be a shared one:
    after a fork a private page moves with the first write, away from where the device would copy to.
    """

    def __init__(self, mapped: mmap.mmap, *, purpose: str) -> None:
        """
        purpose: completes "the host memory for" in a warning.
        """
        self.bytes = torch.frombuffer(mapped, dtype=torch.uint8).untyped_storage()
        self._unlock: weakref.finalize[[int, torch.UntypedStorage], HostMemory] | None = None
        if torch.cuda.is_available():
            self._pin(purpose)

    @property
    def is_pinned(self) -> bool:
        """Return whether the pages are locked."""
        return self._unlock is not None and self._unlock.alive

    def release(self) -> None:
        """Unlock the pages, which are freed with the last view of them; may be called twice."""
        if self._unlock is not None:
            self._unlock()

    def _pin(self, purpose: str) -> None:
        address = self.bytes.data_ptr()
        code = int(torch.cuda.cudart().cudaHostRegister(address, self.bytes.nbytes(), 0))
        if code == 0:
            self._unlock = weakref.finalize(self, _unlock, address, self.bytes)
            self._unlock.atexit = False  # the driver may have gone by then
            return
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")  # CUDA reports the error once more, at the next call
        log.warning("the host memory for %s is not pinned (CUDA error %d): its copies are slower", purpose, code)


def _unlock(address: int, held: torch.UntypedStorage) -> None:
    """Unlock pages when no copy reads or writes them any more; `held` keeps them mapped until then."""
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(address)
