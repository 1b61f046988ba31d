"""Interface of a device to the rest of the package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch


class Accelerator(Protocol):
    """The device of this rank."""

    @property
    def name(self) -> str:
        """Return "cuda" or "cpu"."""
        ...

    @property
    def device(self) -> torch.device:
        """Return the device of this local rank."""
        ...

    @property
    def backend(self) -> str:
        """Return the torch.distributed backend of tensors on `device`: "nccl" or "gloo"."""
        ...

    @property
    def model(self) -> str:
        """Return the name that the maker gives to devices of this kind; empty for a CPU."""
        ...

    @property
    def identity(self) -> str:
        """Return a name of `device` that no other device of any machine has; empty for a CPU, which ranks share."""
        ...

    def synchronize(self) -> None:
        """Wait until every kernel queued on `device` is done."""
        ...

    def memory_allocated(self) -> int:
        """Return the bytes held now: tensors on a GPU, resident set of the process on a CPU."""
        ...

    def total_memory(self) -> int:
        """Return the bytes of memory that `device` has; 0 on a CPU, whose memory is the host's."""
        ...

    def device_count(self) -> int:
        """Return the number of this host's devices that this process sees; 0 on a CPU."""
        ...

    def take_peak_memory(self) -> Mapping[str, int]:
        """Return the largest bytes "allocated" to tensors and "reserved" since the last call; none on a CPU."""
        ...

    def empty_cache(self) -> None:
        """Return cached, unused blocks to the device."""
        ...

    def transformer_config_overrides(self) -> dict[str, Any]:
        """Return the fields of Megatron-Core's TransformerConfig that this device dictates, by name."""
        ...
