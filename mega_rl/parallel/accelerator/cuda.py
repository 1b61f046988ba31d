"""NVIDIA GPUs, without patches of Megatron-Core."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from functools import cache
from operator import attrgetter
from typing import Any

import torch

from mega_rl.environment import bind_near
from mega_rl.parallel.accelerator.base import Accelerator
from mega_rl.parallel.accelerator.gpus import device_index


class CudaAccelerator(Accelerator):
    """The GPU of this local rank."""

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def memory_allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def total_memory(self) -> int:
        return int(torch.cuda.get_device_properties(self.device).total_memory)

    def device_count(self) -> int:
        return torch.cuda.device_count()

    def take_peak_memory(self) -> Mapping[str, int]:
        allocated = torch.cuda.max_memory_allocated(self.device)
        peaks = {"allocated": allocated, "reserved": torch.cuda.max_memory_reserved(self.device)}
        torch.cuda.reset_peak_memory_stats(self.device)
        return peaks

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def transformer_config_overrides(self) -> dict[str, Any]:
        """Return the fusions that the installed packages support."""
        has_te = importlib.util.find_spec("transformer_engine") is not None
        has_apex_kernel = importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
        return {
            "use_cpu_initialization": False,
            # Weight gradients added into main_grad by one kernel, which apex builds: Megatron-Core's own layers raise
            # without it. Transformer Engine's have their own: `mega_rl.engines.models.build.fuse_weight_gradients`.
            "gradient_accumulation_fusion": has_apex_kernel,
            "apply_rope_fusion": has_te,
            "bias_activation_fusion": True,
            "bias_dropout_fusion": True,
            "deallocate_pipeline_outputs": True,
        }


@cache
def prepare() -> CudaAccelerator:
    """Bind this process to its GPU (`device_index`) and the processors near it. Raises UserError without one."""
    device = torch.device("cuda", device_index(os.environ, count=torch.cuda.device_count()))
    torch.cuda.set_device(device)
    facts = torch.cuda.get_device_properties(device)
    address = attrgetter("pci_domain_id", "pci_bus_id", "pci_device_id")(facts)
    bind_near("{:04x}:{:02x}:{:02x}.0".format(*address))
    return CudaAccelerator(device, "cuda", "nccl", facts.name, str(facts.uuid))
