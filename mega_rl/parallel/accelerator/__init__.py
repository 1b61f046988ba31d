"""Device facts behind one small interface. `prepare` comes first: before any import of Megatron-Core."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

import torch

from mega_rl import environment
from mega_rl.config.needs import shares_devices
from mega_rl.config.schema import EngineConfig, RolloutConfig, TrainerConfig
from mega_rl.environment import own_cores
from mega_rl.errors import UserError
from mega_rl.parallel.accelerator import megatron_core
from mega_rl.parallel.accelerator.base import Accelerator, prepare_cuda

__all__ = ["Accelerator", "prepare"]

log = logging.getLogger(__name__)

# cuBLAS's split work space adds up in its own order; NCCL's choice of algorithm changes with load and topology;
# Transformer Engine has attention kernels that add atomically.
DETERMINISTIC = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
}


def variables_of(engine: EngineConfig, rollout: RolloutConfig, trainer: TrainerConfig) -> dict[str, str]:
    """Return the variables of a trainer's rank on a GPU; without effect on a CPU."""
    parallel = engine.megatron
    variables: dict[str, str] = dict(DETERMINISTIC) if trainer.deterministic else {}
    if engine.backend == "megatron" and parallel.tp > 1 and parallel.ddp.name == "ddp":
        # One hardware queue keeps the order in which kernels are started, on which Megatron-Core relies to have a
        # tensor-parallel message on its way before the product that hides it. FSDP's gathers want several queues.
        variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if rollout.backend == "sglang":
        # Servers run so by default, and both ends of a group have to agree.
        variables["NCCL_CUMEM_ENABLE"] = "0"
        if shares_devices(rollout, trainer):
            # Buffers of NVLink's multicast stay allocated for each group, and a server needs the memory in its turn.
            variables["NCCL_NVLS_ENABLE"] = "0"
    return variables


def prepare(
    device: str = "auto", *, variables: Mapping[str, str] = MappingProxyType({}), deepep: bool = False
) -> Accelerator:
    """The accelerator of this process; "auto" takes CUDA where there is one.

    On a CPU this makes Megatron-Core's CUDA assumptions hold (see `accelerator.cpu`), so it must run before the
    first import of `megatron`. Calling it again gives the same accelerator. torch gets this rank's share of the host's
    cores, unless OMP_NUM_THREADS is set.

    variables: environment of the run on a GPU (`variables_of`), which has to be there before CUDA starts.
    deepep: the run sends tokens to experts by DeepEP (`megatron_core.load`).

    Raises UserError: "cuda" without a CUDA device, "cpu" on a machine whose CUDA devices are visible, an unknown name,
    or a Megatron-Core that is not supported, or a package that the CPU or DeepEP needs and does not find; UserErrors:
    releases of packages that are not allowed.
    """
    environment.require_versions()
    if device not in ("auto", "cuda", "cpu"):
        raise UserError(f"trainer.device={device!r}: must be one of auto, cuda, cpu")
    if torch.backends.cuda.is_built() and device != "cpu":
        late = torch.cuda.is_initialized()
        names = environment.use(variables)
        if late and names:
            log.warning("CUDA was used before the run: %s may have no effect; set it in the shell", ", ".join(names))
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise UserError("trainer.device=cuda: no CUDA device is visible; use auto or cpu")
    if device == "cpu" and has_cuda:
        raise UserError(
            "trainer.device=cpu: CUDA devices are visible, and Megatron-Core would use them; "
            "set CUDA_VISIBLE_DEVICES= (empty) to train on the CPU"
        )
    if "OMP_NUM_THREADS" not in os.environ:
        # By itself torch starts a thread for every processor of the host, also in a container that may use two of them.
        torch.set_num_threads(own_cores())
    if problem := megatron_core.problem():
        raise UserError(problem)
    if has_cuda:
        accelerator: Accelerator = prepare_cuda()
    else:
        from mega_rl.parallel.accelerator import cpu

        accelerator = cpu.prepare()
    megatron_core.load(deepep=deepep)
    return accelerator


@contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """Let torch use only algorithms that repeat their bits, or raise, inside, with `on`.

    The libraries read their variables when they first run, so this comes before the first collective.
    """
    if not on:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    environment.use(DETERMINISTIC)
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
