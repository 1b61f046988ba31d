"""Megatron-Core on a CPU: with `accelerator.patches` the only file that changes foreign modules.

Megatron-Core is written for CUDA. On a machine without it, three things make the same code run on gloo:

1. Inside `megatron.*`, and nowhere else, the name `torch.cuda` means the stand-in of `accelerator.standin`, the
   methods `.cuda()` return their object, and device literals such as "cuda" mean "cpu" (`accelerator.rewrite`).
   torch gains a private attribute under which that code finds the stand-in; nothing of torch is replaced.
2. The patches of the installed release (`accelerator.patches`), each run right after the upstream module that
   it changes was imported. Where there is no Triton, modules that import it without need get a stand-in
   (`accelerator.rewrite`).
3. Warning and log filters for what is always said on such a machine.

With CUDA present nothing here installs.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import warnings
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch

from mega_rl.errors import UserError
from mega_rl.parallel.accelerator import megatron_core, standin
from mega_rl.parallel.accelerator.base import Accelerator
from mega_rl.parallel.accelerator.patches import patches
from mega_rl.parallel.accelerator.rewrite import RewritingFinder, stand_in_for_triton

log = logging.getLogger(__name__)

STANDIN_ATTRIBUTE = "_cuda_for_megatron_on_cpu"
NAMES = {"cuda": STANDIN_ATTRIBUTE, "torch.cuda": f"torch.{STANDIN_ATTRIBUTE}"}
LITERALS = {
    "cuda": "cpu",
    "cuda:": "",  # of an f-string with a device's number, which here is the device
    "torch.cuda.FloatTensor": "torch.FloatTensor",
    "torch.cuda.HalfTensor": "torch.HalfTensor",
    "torch.cuda.BFloat16Tensor": "torch.BFloat16Tensor",
}


class CpuAccelerator(Accelerator):
    """The CPU as the device of every rank of a gloo world."""

    def transformer_config_overrides(self) -> dict[str, Any]:
        """Return settings that turn off CUDA kernels and features that are unsafe under gloo."""
        return {
            "use_cpu_initialization": True,
            "gradient_accumulation_fusion": False,
            "apply_rope_fusion": False,
            "bias_activation_fusion": False,
            "bias_dropout_fusion": False,
            "masked_softmax_fusion": False,
            "cross_entropy_loss_fusion": False,
            "tp_comm_overlap": False,
            # Freeing an output whose asynchronous gloo send still reads it corrupts the message.
            "deallocate_pipeline_outputs": False,
        }


def _apply_patches(series: str, module: ModuleType) -> None:
    for patch in patches(series):
        if patch.module == module.__name__:
            patch.apply(module)


def _show_standin() -> None:
    """Hang the stand-in where rewritten code looks for it; each place is a private name that torch does not have."""
    module = standin.build(f"torch.{STANDIN_ATTRIBUTE}")
    sys.modules[module.__name__] = module
    setattr(torch, STANDIN_ATTRIBUTE, module)
    # The rewrite knows names, not objects: `.cuda` of these others must go on to mean what it means.
    for owner in (torch.backends, torch.version):
        setattr(owner, STANDIN_ATTRIBUTE, owner.cuda)

    def itself(self: Any, *args: object, **kwargs: object) -> Any:
        return self

    for method_owner in (torch.Tensor, torch.nn.Module):
        setattr(method_owner, STANDIN_ATTRIBUTE, itself)


# (category, start of the message, module that it is attributed to): always said here, and nothing to act on.
NOISE: tuple[tuple[type[Warning], str, str], ...] = (
    (UserWarning, r"(Transformer Engine and )?Apex (is|are) not installed", r"megatron\.core\."),
    (UserWarning, r"MimoModelConfig is experimental", r"megatron\.core\.models\.mimo\."),  # imported, and not used
    (UserWarning, r"full scope is deprecated", r"megatron\.core\.transformer\.transformer_config"),
    (UserWarning, r"The \.grad attribute of a Tensor that is not a leaf", r"megatron\.core\.optimizer\.optimizer"),
    (UserWarning, r"When using async grad allreduce it is recommended", r"megatron\.core\.tensor_parallel\.layers"),
    (UserWarning, r"When using sequence parallelism it is recommended", r"megatron\.core\.tensor_parallel\.layers"),
    # Experts that are not cut: right, and said of each.
    (UserWarning, r"`sequence_parallel` is set to `True`, but tensor", r"megatron\.core\.tensor_parallel\.layers"),
    (FutureWarning, r"`load_state_dict` is deprecated", r"megatron\.core\.dist_checkpointing\.strategies\.torch"),
    (FutureWarning, r"Please use DTensor instead and we are deprecating", r"torch\.distributed\.checkpoint\."),
    (
        FutureWarning,
        r"`torch\.distributed\.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated",
        r"torch\.distributed\.c10d_logger",
    ),
)


def _not_about_rng(record: logging.LogRecord) -> bool:
    """Upstream warns when the CPU generator moved in a "GPU" random context: here it always does, being the same."""
    return record.msg != "CPU RNG state changed within GPU RNG context"


def _quiet() -> None:
    """Silence `NOISE` and one log message."""
    for category, message, module in NOISE:
        warnings.filterwarnings("ignore", message=message, category=category, module=module)
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_not_about_rng)


@cache
def prepare() -> CpuAccelerator:
    """Make Megatron-Core importable and runnable on this CPU.

    Raises UserError: a megatron-core that is not supported; megatron imported already.
    """
    assert not torch.cuda.is_available(), "the CPU stand-in must not be installed where CUDA is available"
    if problem := megatron_core.problem():
        raise UserError(problem)
    if "megatron" in sys.modules:
        raise UserError(
            "megatron was imported before mega_rl could make it run without CUDA; "
            "import mega_rl.trainer.assemble, or call mega_rl.parallel.accelerator.prepare(), before its first import"
        )
    _show_standin()
    _quiet()
    extra = {} if importlib.util.find_spec("triton") else stand_in_for_triton()
    series, version = megatron_core.installed_series(), megatron_core.installed_version()
    if version not in (compared := megatron_core.RELEASES[series]):
        log.warning("megatron-core %s: what changes it for CPUs was written for %s", version, compared[-1])
    apply = partial(_apply_patches, series)
    finder = RewritingFinder("megatron", names=NAMES, extra_names=extra, literals=LITERALS, after_exec=apply)
    sys.meta_path.insert(0, finder)
    return CpuAccelerator(standin.CPU, "cpu", "gloo")
