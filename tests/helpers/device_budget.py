"""Devices with so many bytes, and a trainer and SGLang servers on them that die when there are not enough.

A server speaks SGLang's control endpoints over real HTTP (`UpdateServer`). As SGLang does, it sizes weights and KV
cache by a share of what is free when it starts, and holds its CUDA graphs and activations until it ends.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mega_rl.errors import RunError
from mega_rl.protocols import PARTS
from mega_rl.rollout.sglang.control import Endpoint
from mega_rl.rollout.sglang.server.process import ServerSettings
from tests.helpers.update_server import UpdateServer

GIB = 1 << 30
DEFAULT_FRACTION = 0.83  # SGLang's own on 80 GB


class OvercommitError(RuntimeError):
    """An owner asked for more bytes than its device has left."""


@dataclass
class DeviceMemory:
    """One device's bytes by owner, and the largest sum that each device was ever asked for."""

    total: int
    held: dict[str, int] = field(default_factory=dict)
    largest: int = 0

    @property
    def used(self) -> int:
        return sum(self.held.values())

    def take(self, owner: str, size: int) -> None:
        """Give `owner` these bytes. Raises OvercommitError, with who holds what, where they are not there."""
        self.largest = max(self.largest, self.used + size)
        if self.used + size > self.total:
            holders = {name: f"{held / GIB:.1f}" for name, held in self.held.items()}
            raise OvercommitError(f"{owner} wants {size / GIB:.1f} of {self.total / GIB:.1f} GiB, held: {holders}")
        self.held[owner] = self.held.get(owner, 0) + size

    def free(self, owner: str) -> int:
        """Take all bytes of `owner`; return how many."""
        return self.held.pop(owner, 0)


class BudgetEngine:
    """An engine of which each device holds the same bytes; `offload` and `onload` move them."""

    def __init__(self, name: str, devices: Sequence[DeviceMemory], **parts: int) -> None:
        self.name, self.devices, self.sizes = name, devices, {part: parts.get(part, 0) for part in PARTS}
        self.here: set[str] = set()
        self.onload()

    def onload(self, parts: Collection[str] = PARTS) -> None:
        for part in [part for part in PARTS if part in parts and part not in self.here]:
            for device in self.devices:
                device.take(f"{self.name} {part}", self.sizes[part])
            self.here.add(part)

    def offload(self, parts: Collection[str] = PARTS) -> int:
        moved = [part for part in PARTS if part in parts and part in self.here]
        self.here -= set(moved)
        return sum(device.free(f"{self.name} {part}") for part in moved for device in self.devices)

    def is_offloaded(self, part: str) -> bool:
        return part not in self.here


class BudgetServer(UpdateServer):
    """A server on devices with a budget; it dies of more bytes than there are, as a scheduler does."""

    def __init__(
        self, index: int, devices: Sequence[DeviceMemory], *, static: Sequence[int], weights: int, idle: int
    ) -> None:
        """
        static: bytes of weights and KV cache on each device; weights: those of the weights; idle: of graphs and
        activations, which are never released.
        """
        super().__init__(index, tp=len(devices), info=INFO)
        self.devices, self.name = devices, f"server {index}"
        caches = [size - weights for size in static]
        if min(caches) <= 0:
            raise RunError(f"{self.name}: Loaded weights leave no GPU memory for the KV cache")
        self.sizes = {"weights": [weights] * len(devices), "kv_cache": caches, "idle": [idle] * len(devices)}
        self.holds: set[str] = set()
        for tag in self.sizes:
            self.take(tag)

    def take(self, tag: str) -> None:
        assert tag not in self.holds, f"SGLang fails when it resumes {tag}, which it holds"
        for device, size in zip(self.devices, self.sizes[tag], strict=True):
            device.take(f"{self.name} {tag}", size)
        self.holds.add(tag)

    def free(self, tag: str) -> None:
        assert tag in self.holds, f"SGLang fails when it releases {tag}, which it does not hold"
        for device in self.devices:
            device.free(f"{self.name} {tag}")
        self.holds.discard(tag)

    def die(self) -> None:
        super().die()
        for tag in sorted(self.holds):
            self.free(tag)

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        if path == "/release_memory_occupation":
            for tag in body["tags"]:
                self.free(tag)
        elif path == "/resume_memory_occupation":
            try:
                for tag in body["tags"]:
                    self.take(tag)
            except OvercommitError as error:
                return 500, str(error)
        elif path.startswith("/update_weights_from"):
            assert "weights" in self.holds, "weights came to a server without memory for them"
        elif path == "/generate":
            assert {"weights", "kv_cache"} <= self.holds, "a server without its memory was asked to generate"
        return super().answer(path, body)


INFO = {
    "model": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "is_generation": True, "model_path": "x"},
    "server": {"version": "0.5.21", "dtype": "float32", "dp_size": 1, "pp_size": 1},
}


class BudgetProcess:
    """`ServerProcess` of a `BudgetServer`. It measures what is free at `start`, and takes its share some time later."""

    def __init__(self, settings: ServerSettings, index: int, devices: Sequence[DeviceMemory], sizes: dict[str, int]):
        self.settings, self.index, self.log_file = settings, index, Path("server.log")
        self._devices = devices[settings.base_gpu : settings.base_gpu + settings.tp]
        assert len(self._devices) == settings.tp, f"server {index} has no device {settings.base_gpu}"
        self._sizes = sizes
        self._static: list[int] = []
        self.starts = 0
        self.server: BudgetServer | None = None

    def start(self) -> None:
        self.starts += 1
        fraction = self.settings.args.get("mem_fraction_static", DEFAULT_FRACTION)
        self._static = [int(fraction * (device.total - device.used)) for device in self._devices]

    def wait_ready(self) -> Endpoint:
        try:
            self.server = BudgetServer(self.index, self._devices, static=self._static, **self._sizes)
        except OvercommitError as error:
            raise RunError(str(error)) from None
        self.server.__enter__()
        return self.server.endpoint

    def stop(self) -> None:
        if self.server is not None:
            self.server.die()
        self.server = None


@dataclass(frozen=True)
class BudgetAccelerator:
    """`Accelerator` of devices with a budget."""

    devices: Sequence[DeviceMemory]
    name: str = "cuda"
    backend: str = "nccl"

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)

    def synchronize(self) -> None: ...

    def empty_cache(self) -> None:
        for device in self.devices:
            device.free("cached")

    def memory_allocated(self) -> int:
        return sum(size for owner, size in self.devices[0].held.items() if not owner.startswith("server"))

    def total_memory(self) -> int:
        return self.devices[0].total

    def device_count(self) -> int:
        return len(self.devices)

    def transformer_config_overrides(self) -> dict[str, Any]:
        return {}
