"""Report of `mega-rl doctor` on this machine: versions, devices, optional packages and their replacements."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass

import mega_rl
from mega_rl import versions
from mega_rl.accelerator import megatron_core
from mega_rl.accelerator.patches import patches
from mega_rl.config.checkout import made_by_make
from mega_rl.rollout.sglang.server.installation import SGLANG_VERSION, find_sglang, how_to_install
from mega_rl.versions import installed_version

CORE = (
    "torch",
    "megatron-core",
    "transformers",
    "tensordict",
    "safetensors",
    "datasets",
    "math-verify",
    "psutil",
)


@dataclass(frozen=True)
class Optional:
    """A package that is used if it is installed."""

    name: str
    module: str  # found by this module, which packages of the same name by others do not have
    distribution: str
    instead: str  # what happens without it


OPTIONAL = (
    Optional(
        "transformer-engine", "transformer_engine.pytorch", "transformer-engine", "local layers on torch operators"
    ),
    # The apex of the package index is another project; NVIDIA's has optimizers and comes with its containers.
    Optional("apex (NVIDIA)", "apex.optimizers", "apex", "torch's AdamW and unfused kernels"),
    Optional("flash-attn", "flash_attn", "flash-attn", "torch's scaled_dot_product_attention"),
    Optional("wandb", "wandb", "wandb", "metrics.jsonl and TensorBoard"),
    Optional("mlflow", "mlflow", "mlflow-skinny", "metrics.jsonl and TensorBoard"),
    Optional("swanlab", "swanlab", "swanlab", "metrics.jsonl and TensorBoard"),
)


def report() -> Iterator[str]:
    """Yield the lines of the report, section by section."""
    yield f"python               {platform.python_version()} on {platform.system()} {platform.machine()}"
    yield f"mega_rl              {mega_rl.__version__}"
    yield from map(_core_line, CORE)
    problem = megatron_core.problem()
    if problem:
        yield f"{'':<20} NOT SUPPORTED: {problem}"
    yield ""
    yield from _devices()
    yield ""
    yield from (_optional_line(package) for package in OPTIONAL)
    yield _sglang_line()
    yield ""
    yield from _patches()


def _core_line(name: str) -> str:
    remark = versions.remark(name)
    installed = installed_version(name) or f"MISSING: run {how_to_install_package(name)}"
    return f"{name:<20} {installed}{remark and f'; {remark}'}"


def how_to_install_package(name: str) -> str:
    """Return the command that installs a package which mega_rl requires, in the version that it requires."""
    if made_by_make():
        return "'make setup'"
    try:
        required = importlib.metadata.requires("mega_rl") or []
    except importlib.metadata.PackageNotFoundError:
        required = []
    specifiers = (text.partition(";")[0].strip() for text in required if "extra ==" not in text)
    matching = (text for text in specifiers if re.split(r"[^\w-]", text.replace("_", "-"), maxsplit=1)[0] == name)
    return f'pip install "{next(matching, name)}"'


def is_importable(module: str) -> bool:
    """Return whether a module could be imported; imports its parent packages to look inside."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, OSError, RuntimeError, AttributeError):
        return False  # a parent is missing, or does not load here


def _optional_line(package: Optional) -> str:
    if is_importable(package.module):
        remark = versions.remark(package.distribution)
        return f"{package.name:<20} {installed_version(package.distribution) or 'found'}{remark and f'; {remark}'}"
    return f"{package.name:<20} not found; used instead: {package.instead}"


def _sglang_line() -> str:
    installation = find_sglang()
    if installation is None:
        status = f"not found; used instead: the embedded Hugging Face rollout engine ({how_to_install()})"
    else:
        where = "beside the rest" if installation.folder is None else f"for CPUs, in {installation.folder}"
        wrong = "" if installation.version == SGLANG_VERSION else f"; mega_rl works with {SGLANG_VERSION} only"
        status = f"{installation.version}, {where}{wrong}"
    return f"{'sglang':<20} {status}"


def _devices() -> Iterator[str]:
    import torch

    yield f"cpu                  {os.cpu_count()} cores"
    if not torch.cuda.is_available():
        yield "cuda                 no device; used instead: the CPU, with gloo between ranks"
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        yield f"cuda:{index:<15} {properties.name}, {properties.total_memory / 2**30:.0f} GiB"


def _patches() -> Iterator[str]:
    import torch

    if torch.cuda.is_available():
        yield "Megatron-Core runs unpatched."
        return
    if megatron_core.problem():
        return
    release = megatron_core.installed_release()
    yield f"Changes to Megatron-Core {release.series} that make it run without CUDA:"
    for patch in patches(release):
        yield f"  {patch.name:<26} {patch.symbol}"
        yield f"  {'':<26} {patch.reason}"
