"""Interface of a device; NVIDIA's GPUs, which rank has which, copies to them; L2 norms."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
import mmap
import os
import resource
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from mega_rl.environment import bind_near
from mega_rl.errors import UserError

log = logging.getLogger(__name__)


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
        """Return the bytes held now: tensors on a GPU, the resident set on a CPU."""
        return resident_bytes()

    def total_memory(self) -> int:
        """Return the bytes of memory of `device`; 0 on a CPU, whose memory is the host's."""
        return 0

    def device_count(self) -> int:
        """Return the number of this host's devices that this process sees; 0 on a CPU."""
        return 0

    def take_peak_memory(self) -> Mapping[str, int]:
        """Return the most bytes "allocated" and "reserved" since the last call; none on a CPU."""
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


VISIBLE = "CUDA_VISIBLE_DEVICES"
HIDDEN = {VISIBLE: ""}  # environment of a rank that runs on the CPU of a machine with GPUs


def gpu_for_each(ranks: int) -> bool:
    """Return whether this machine shows a GPU for each of so many ranks."""
    return torch.cuda.device_count() >= ranks


def environment_of_ranks(ranks: int) -> Mapping[str, str]:
    """Return the variables of ranks, which run on GPUs if each can have one."""
    return {} if gpu_for_each(ranks) else HIDDEN


def device_index(environment: Mapping[str, str], *, count: int) -> int:
    """Return the index of this rank's GPU among `count`: LOCAL_RANK, 0 without a launcher.

    A launcher that shows each process only its own GPU (Ray, Slurm with --gpus-per-task=1) leaves a single index, 0,
    for every local rank. It has set CUDA_VISIBLE_DEVICES to one device then, as a user may have who starts several
    ranks on that device; `claim` finds those when the ranks meet.

    Raises UserError: more local ranks than visible GPUs.
    """
    local_rank = int(environment.get("LOCAL_RANK", "0"))
    if local_rank < count:
        return local_rank
    if count == 1 and len([name for name in environment.get(VISIBLE, "").split(",") if name.strip()]) == 1:
        return 0
    raise UserError(
        f"LOCAL_RANK={local_rank}: only {count} CUDA device(s) are visible, and each rank needs its own; start at most "
        f"{count} rank(s) per node, or set {VISIBLE}= (empty) to train on the CPU"
    )


def claim(identity: str, *, store: Store, rank: int, timeout: timedelta) -> None:
    """Enter this rank as the only user of its device into the shared store.

    identity: a name of the device that is unique among all machines; empty for a CPU, which ranks may share.

    Raises UserError: another rank uses the same device.
    """
    if not identity:
        return
    store.set_timeout(timeout)
    owner = int(store.compare_set(f"device/{identity}", "", str(rank)))
    if owner != rank:
        raise UserError(
            f"ranks {owner} and {rank} have the same CUDA device ({identity}), and each needs its own; start one rank "
            f"per device, let {VISIBLE} show every rank's device or each rank its own, or set {VISIBLE}= (empty) to "
            "train on the CPU"
        )


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
            "deallocate_pipeline_outputs": True,
        }


@cache
def prepare_cuda() -> CudaAccelerator:
    """Bind this process to its GPU (`device_index`) and the processors near it. Raises UserError without one."""
    device = torch.device("cuda", device_index(os.environ, count=torch.cuda.device_count()))
    torch.cuda.set_device(device)
    facts = torch.cuda.get_device_properties(device)
    address = attrgetter("pci_domain_id", "pci_bus_id", "pci_device_id")(facts)
    bind_near("{:04x}:{:02x}:{:02x}.0".format(*address))
    return CudaAccelerator(device, "cuda", "nccl", facts.name, str(facts.uuid))


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the host tensor `tensor` on `device`; a GPU's copy is queued behind its kernels.

    A copy from ordinary memory would make the host wait until the device has done all that is queued. Pinned memory
    comes from torch's cache, which gives a block out again when its copy is done.
    """
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


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
        torch.empty(0, dtype=torch.uint8).set_(
            self.bytes
        ).zero_()  # all threads map pages; the lock alone is one thread
        code = int(torch.cuda.cudart().cudaHostRegister(address, self.bytes.nbytes(), 0))
        if code == 0:
            self._unlock = weakref.finalize(self, _unlock, address, self.bytes)
            self._unlock.atexit = False  # the driver may have gone by then
            return
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")  # CUDA reports the error once more, at the next call
        log.warning("the host memory for %s is not pinned (CUDA error %d): its copies are slower", purpose, code)


def _unlock(address: int, held: torch.UntypedStorage) -> None:
    """Unlock pages when no copy uses them any more; `held` keeps them mapped until then."""
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(address)


# Elements whose squares a CPU adds in float32: torch's norm of a long tensor is off by 2 % at 1.5e8 elements.
BLOCK = 4096


def squared_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of all elements' squares, a float64 scalar where the tensors are.

    The host does not wait. tensors: floating, on one device, of one dtype; without any, zero on the host.
    """
    norms = [torch.zeros(1, dtype=torch.float64)]
    if tensors:
        dtype = torch.promote_types(tensors[0].dtype, torch.float32)
        if tensors[0].device.type == "cpu":
            norms += [_block_norms(tensor.detach().reshape(-1), dtype).double() for tensor in tensors]
        else:
            norms = [torch.stack(torch._foreach_norm(list(tensors), dtype=dtype)).double()]
    return torch.cat(norms).square().sum()


def norm(tensor: Tensor) -> float:
    """Return the L2 norm of one tensor of any shape; the host waits for it."""
    return math.sqrt(float(squared_norm([tensor])))


def distance(actual: Tensor, expected: Tensor, *, floor: float) -> float:
    """Return |actual - expected| / |expected| of two tensors; infinite for no number.

    floor: size of an element; a smaller `expected` counts as a tensor of this size.
    """
    gap = norm(actual.double() - expected.double())
    relative = gap / max(norm(expected.double()), floor * math.sqrt(expected.numel())) if gap else 0.0
    return relative if math.isfinite(relative) else math.inf


def _block_norms(flat: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the norms of blocks of [N] and of the rest, [N // BLOCK + 1]."""
    end = len(flat) // BLOCK * BLOCK
    whole = torch.linalg.vector_norm(flat[:end].view(-1, BLOCK), dim=1, dtype=dtype)
    return torch.cat([whole, torch.linalg.vector_norm(flat[end:], dtype=dtype).view(1)])
