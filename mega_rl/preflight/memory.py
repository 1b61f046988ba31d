"""The check that every rank's GPU holds the run; imports no torch, so the driver's library is asked for its size."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterator, Mapping

from mega_rl.config.schema import Config
from mega_rl.converters.architecture import HFConfig
from mega_rl.plan.memory import judge
from mega_rl.plan.search import advice, cheapest
from mega_rl.plan.setup import Machine, RunSetup
from mega_rl.preflight.launcher import gpus_are_hidden, ranks_of_this_host

_LIBRARY = "libnvidia-ml.so.1"


def check_memory(config: Config, checkpoints: Mapping[str, HFConfig], world_size: int) -> Iterator[str]:
    """Yield the sentence that says what to change where a run cannot fit the GPUs that are here.

    Nothing without GPUs, or with trainer.device=cpu: host memory is only reported, by `mega-rl plan`. The settings must
    be legal.
    """
    memory = None if config.trainer.device == "cpu" else smallest_gpu()
    if memory is None or "model.path" not in checkpoints:
        return
    has_te = importlib.util.find_spec("transformer_engine") is not None
    setup = RunSetup(config, checkpoints, Machine(world_size, ranks_of_this_host(world_size), memory, has_te))
    verdict = judge(setup)
    if verdict.fits is False:
        yield (
            f"{config.model.path} on {world_size} GPU{'s' * (world_size > 1)}: {verdict.sentence}; "
            f"{advice(setup, cheapest(setup))} (mega-rl plan shows all of it)"
        )


def smallest_gpu() -> int | None:
    """Return the bytes of the smallest GPU of this machine, by NVIDIA's driver; None where there is none."""
    if gpus_are_hidden():
        return None
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return None
    if library.nvmlInit_v2():
        return None
    try:
        return min(_sizes(library), default=None)
    finally:
        library.nvmlShutdown()


class _NvmlMemory(ctypes.Structure):
    """`nvmlMemory_t` of NVIDIA's management library."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def _sizes(library: ctypes.CDLL) -> Iterator[int]:
    count = ctypes.c_uint()
    if library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return
    for index in range(count.value):
        handle, memory = ctypes.c_void_p(), _NvmlMemory()
        failed = library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
        if not failed and not library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)):
            yield int(memory.total)
