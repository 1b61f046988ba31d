"""A stand-in for Triton, for modules of Megatron-Core that import it and do without it on a CPU.

From 0.18 the schedules and experts of Megatron-Core import kernels of an option that is off here (paging activations of
experts out), and with them Triton, which torch brings along for CUDA only. The modules of `NEED` get a stand-in under a
private name; everybody else still finds that there is no Triton.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

NEED = ("megatron.core.transformer.moe.paged_stash", "megatron.core.transformer.moe.ops.paged_stash")
STANDIN = "_triton_for_megatron_on_cpu"


class AbsentKernel:
    """A kernel that cannot be started."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = function.__qualname__

    def __getitem__(self, grid: object) -> NoReturn:
        raise RuntimeError(f"{self.name} is a Triton kernel, and Triton is not installed")


def install() -> dict[str, dict[str, str]]:
    """Make the stand-in importable; returns the names to replace in each of `NEED`."""
    triton, language = ModuleType(STANDIN), ModuleType(f"{STANDIN}.language")
    vars(triton).update(jit=AbsentKernel, language=language)
    vars(language).update(constexpr=int)  # an annotation of the kernels' parameters
    sys.modules.update({STANDIN: triton, f"{STANDIN}.language": language})
    names = {"triton": STANDIN, "triton.language": f"{STANDIN}.language"}
    return dict.fromkeys(NEED, names)
