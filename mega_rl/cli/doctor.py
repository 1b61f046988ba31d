"""Report of `mega-rl doctor` on this machine: versions, devices, what works; `--require` is a smoke test."""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import mega_rl
from mega_rl.environment import installed_version, requirements, version_problems
from mega_rl.errors import UserError
from mega_rl.parallel.accelerator import megatron_core
from mega_rl.parallel.accelerator.patches import patches
from mega_rl.rewards.sandbox import Limits, SandboxError
from mega_rl.rewards.sandbox.local import LocalSandbox, Tool
from mega_rl.rollout.sglang.server.installation import TESTED, find_sglang, how_to_install, missing_tools

CORE = ("torch", "megatron-core", "transformers", "tensordict", "safetensors", "datasets", "math-verify", "psutil")
# Errors of importing a package that is absent, was built against another torch, or misses a library of the system.
DOES_NOT_LOAD = (ImportError, OSError, RuntimeError, AttributeError)
INSTEAD = {
    "cuda": "the CPU, with gloo between ranks",
    "te": "local layers on torch operators",
    "apex": "torch's AdamW and unfused kernels",
    "flash-attn": "torch's scaled_dot_product_attention",
    "sglang": "the embedded Hugging Face rollout engine",
    **dict.fromkeys(("wandb", "mlflow", "swanlab"), "metrics.jsonl and TensorBoard"),
}


def report() -> Iterator[str]:
    """Yield the lines of the report: versions, devices, and each requirement with what takes its place."""
    import torch

    yield f"python               {platform.python_version()} on {platform.system()} {platform.machine()}"
    yield f"mega_rl              {mega_rl.__version__}"
    for name in (*CORE, "transformer-engine", "flash-attn", "ray"):
        yield f"{name:<20} {installed_version(name) or 'not installed'}"
    yield f"cpu                  {os.cpu_count()} cores"
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        yield f"cuda:{index:<15} {properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    yield ""
    for name, check in REQUIREMENTS.items():
        reason = check()
        instead = f"; used instead: {INSTEAD[name]}" if name in INSTEAD else ""
        yield f"{name:<20} " + ("works" if reason is None else f"no: {reason}{instead}")
    if _no_cuda() and not megatron_core.problem():
        series = megatron_core.installed_series()
        yield f"{len(patches(series))} patches of Megatron-Core {series}, which make it run without CUDA"


def missing(names: Sequence[str]) -> Iterator[str]:
    """Yield a line for each requirement that is absent or does not load, with the reason."""
    unknown = sorted(set(names) - REQUIREMENTS.keys())
    if unknown or not names:
        given = f"{', '.join(unknown)}: no such requirement" if unknown else "names nothing"
        raise UserError(f"--require: {given}; names, with commas between them: {', '.join(REQUIREMENTS)}")
    for name in dict.fromkeys(names):
        reason = REQUIREMENTS[name]()
        if reason is not None:
            yield f"{name:<20} MISSING: {reason}"


def _no_core() -> str | None:
    absent = {name for name in CORE if installed_version(name) is None}
    declared = [str(one) for one in requirements() if one.name in absent] or sorted(absent)
    fixes = [f"pip install {' '.join(map(repr, declared))}"] if absent else []
    return "; ".join([*fixes, *version_problems()]) or None


def _no_cuda() -> str | None:
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA"
    if not torch.cuda.is_available():
        return "no device is visible; a container gets them from its runtime (docker run --gpus all) and the driver"
    return None


def _no_sglang() -> str | None:
    installation = find_sglang()
    if installation is None:
        return f"not installed; {how_to_install()}"
    if installation.version not in TESTED:
        return f"{installation.version} is installed; mega_rl works with {' and '.join(TESTED)} only"
    return "; ".join(missing_tools()) or None if installation.folder is None else None


def _no_sandbox() -> str | None:
    try:
        LocalSandbox(Tool.find(), Limits()).check()
    except SandboxError as error:
        return str(error)
    return None


def _does_not_load(module: str) -> str | None:
    """Return why a module cannot be imported, in one line; None if it can."""
    try:
        importlib.import_module("torch")  # brings the libraries that its extensions are linked with
        importlib.import_module(module)
    except DOES_NOT_LOAD as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return None


# Name of `--require` -> check that returns the reason why it is missing. A check imports what it can: a compiled
# package that is installed may still not load.
REQUIREMENTS: Mapping[str, Callable[[], str | None]] = {
    "core": _no_core,
    "torch": partial(_does_not_load, "torch"),
    "cuda": _no_cuda,
    "megatron": megatron_core.problem,
    "te": partial(_does_not_load, "transformer_engine.pytorch"),
    "apex": partial(_does_not_load, "fused_weight_gradient_mlp_cuda"),  # the only part of apex that is used
    "flash-attn": partial(_does_not_load, "flash_attn.flash_attn_interface"),
    "sglang": _no_sglang,
    "sandbox": _no_sandbox,
    **{name: partial(_does_not_load, name) for name in ("ray", "wandb", "mlflow", "swanlab")},
}
