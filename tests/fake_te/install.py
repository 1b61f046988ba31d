"""Transformer Engine's Python made to run on a CPU, as `accelerator.cpu` does it for Megatron-Core.

`install` comes before `accelerator.prepare`. Inside `transformer_engine.*` the name `torch.cuda` then means a
stand-in for one device, `.cuda()` returns its tensor, `.is_cuda` asks for the CPU and the literal "cuda" means "cpu".
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from mega_rl.parallel.accelerator import cpu, patches
from mega_rl.parallel.accelerator.base import CudaAccelerator
from mega_rl.parallel.accelerator.cpu import CpuAccelerator, RewritingFinder
from tests.fake_te.extension import compiled_half, triton_kernels

ATTRIBUTE = "_cuda_for_transformer_engine_on_cpu"
HOPPER = SimpleNamespace(name="fake", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30)
NAMES = {
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "get_device_properties": lambda *_: HOPPER,
    "get_device_capability": lambda *_: (HOPPER.major, HOPPER.minor),
    "is_current_stream_capturing": lambda: False,
}
# Changes that a CPU needs for want of Transformer Engine.
WITHOUT_TE = {"no_transformer_engine_in_mla", "recompute_without_fp8"}


def install() -> None:
    """Make `transformer_engine` importable, and the engine take it for what a GPU would have."""
    sys.modules["transformer_engine_torch"] = compiled_half()
    sys.modules.update(triton_kernels())
    _show_device()
    names = {"cuda": ATTRIBUTE, "torch.cuda": f"torch.{ATTRIBUTE}", "is_cuda": "is_cpu"}
    finder = RewritingFinder("transformer_engine", names=names, literals={"cuda": "cpu"}, after_exec=_finish)
    sys.meta_path.insert(0, finder)
    known = {patch.name for patch in patches.patches()}
    assert known >= WITHOUT_TE, f"no patch of these names: {sorted(WITHOUT_TE - known)}"
    patches._PATCHES[:] = [patch for patch in patches._PATCHES if patch.name not in WITHOUT_TE]


def use_settings_of_cuda() -> None:
    """Give the CPU's engine the fusions that `CudaAccelerator` asks for where Transformer Engine is installed."""
    CpuAccelerator.transformer_config_overrides = CudaAccelerator.transformer_config_overrides  # type: ignore[method-assign, assignment]


def _show_device() -> None:
    module = cpu.build_standin(f"torch.{ATTRIBUTE}")
    vars(module).update(NAMES)
    sys.modules[module.__name__] = module
    setattr(torch, ATTRIBUTE, module)
    for owner in (torch.backends, torch.version):
        setattr(owner, ATTRIBUTE, owner.cuda)

    def itself(self: Any, *_: object, **__: object) -> Any:
        return self

    for method_owner in (torch.Tensor, torch.nn.Module):
        setattr(method_owner, ATTRIBUTE, itself)


def _finish(module: ModuleType) -> None:
    """Change what asks for the number of a device, or for a library, in a module that was just imported."""
    if module.__name__ == "transformer_engine.common":
        vars(module).update(load_framework_extension=lambda _: None)
    if module.__name__ == "transformer_engine.pytorch.utils":
        vars(module).update(canonicalize_device=lambda _: cpu.CPU)
