"""Start of a run's processes: their commands, and variables that CUDA, NCCL, cuBLAS and torch's allocator read once.

All of them are decided here (docs/gpus.md). What the user has set stays as it is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mega_rl.config.schema import EngineConfig, RolloutConfig, TrainerConfig

# Descriptor of a file into which the command of each rank writes, at the rank's place, one more than its exit code: a
# reward function or a library may call os._exit(0).
LAST_WORD = "MEGA_RL_LAST_WORD"
# cuBLAS's split work space adds up in an order of its own; NCCL's choice of algorithm changes with load and topology;
# Transformer Engine has attention kernels that add atomically.
DETERMINISTIC = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
}
# The trainer's allocator. Segments that expand cannot be released by SGLang's memory saver, nor shared over CUDA IPC.
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
SOURCES = Path(__file__).parents[1]  # an installed package has no Makefile there
_set_by_run: set[str] = set()  # and not by the user


def python_module(module: str, *arguments: str, python: str = sys.executable) -> list[str]:
    """Return the command that runs a Python module as a program, without the working folder on its path.

    Without -P that folder comes before all that is installed: its h2.py runs where a library tries `import h2`.
    """
    return [python, "-P", "-m", module, *arguments]


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
        if _shares_devices(rollout, trainer):
            # Buffers of NVLink's multicast stay allocated for each group, and a server needs the memory in its turn.
            variables["NCCL_NVLS_ENABLE"] = "0"
    return variables


def use(variables: Mapping[str, str]) -> list[str]:
    """Set each variable that has no value in this process; returns the names of those that were set."""
    names = [name for name in variables if name not in os.environ]
    os.environ.update({name: variables[name] for name in names})
    _set_by_run.update(names)
    return names


def of_other_programs() -> dict[str, str]:
    """Return this process's environment without what is meant for the trainer alone."""
    return {name: value for name, value in os.environ.items() if name not in _set_by_run and name not in _ALLOCATOR}


def _shares_devices(rollout: RolloutConfig, trainer: TrainerConfig) -> bool:
    """Return whether servers are placed on the trainer's devices if it trains on GPUs."""
    sglang = rollout.sglang
    if sglang.placement == "auto":
        return not sglang.urls and not trainer.async_steps
    return sglang.placement == "colocated"


def made_by_make() -> bool:
    """Return whether this program runs in the environment that `make` makes in a source tree, from that tree."""
    folder = SOURCES / ".venv"
    return (SOURCES / "Makefile").is_file() and folder.is_dir() and folder.resolve() == Path(sys.prefix).resolve()
