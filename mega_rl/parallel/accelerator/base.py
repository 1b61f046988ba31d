"""Interface of a device to the rest of the package, and what it is on a CPU."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Accelerator:
    """The device of this rank; its methods are those of a CPU."""

    device: torch.device
    name: str  # "cuda" or "cpu"
    backend: str  # "nccl" or "gloo", for tensors on `device`
    model: str = ""  # the maker's name of devices of this kind; empty for a CPU
    identity: str = ""  # a name that no other device of any machine has; empty for a CPU, which ranks share

    def synchronize(self) -> None:
        """Wait until every kernel queued on `device` is done."""

    def memory_allocated(self) -> int:
        """Return the bytes held now: tensors on a GPU, resident set of the process on a CPU."""
        return resident_bytes()

    def total_memory(self) -> int:
        """Return the bytes of memory that `device` has; 0 on a CPU, whose memory is the host's."""
        return 0

    def device_count(self) -> int:
        """Return the number of this host's devices that this process sees; 0 on a CPU."""
        return 0

    def take_peak_memory(self) -> Mapping[str, int]:
        """Return the largest bytes "allocated" to tensors and "reserved" since the last call; none on a CPU."""
        return {}

    def empty_cache(self) -> None:
        """Return cached, unused blocks to the device."""

    def transformer_config_overrides(self) -> dict[str, Any]:
        """Return the fields of Megatron-Core's TransformerConfig that this device dictates, by name."""
        return {}


def resident_bytes() -> int:
    """Return the resident set of this process, in bytes."""
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()
    except FileNotFoundError:  # no procfs: the peak is the best there is; macOS counts bytes, others KiB
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
