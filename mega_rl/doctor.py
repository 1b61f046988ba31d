"""What `mega-rl doctor` says of this machine: versions, devices, optional packages and what stands in for them."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass

import mega_rl
from mega_rl.rollout.sglang.installation import SGLANG_VERSION, find_sglang, how_to_install

CORE = (
    "torch",
    "megatron-core",
    "transformers",
    "tensordict",
    "safetensors",
    "datasets",
    "omegaconf",
    "math-verify",
    "psutil",
)


@dataclass(frozen=True)
class Optional:
    """A package that is used where it is found."""

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
    Optional("ray", "ray", "ray", "torchrun or srun start the ranks"),
    Optional("wandb", "wandb", "wandb", "metrics.jsonl and TensorBoard"),
)


def report() -> Iterator[str]:
    """Lines of the report, section by section."""
    yield f"python               {platform.python_version()} on {platform.system()} {platform.machine()}"
    yield f"mega_rl              {mega_rl.__version__}"
    yield from ("{:<20} {}".format(name, version(name) or "MISSING: run 'make setup'") for name in CORE)
    yield ""
    yield from _devices()
    yield ""
    yield from (_optional_line(package) for package in OPTIONAL)
    yield _sglang_line()
    yield ""
    yield from _patches()


def version(distribution: str) -> str | None:
    """Installed version of a distribution; None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def found(module: str) -> bool:
    """Whether a module could be imported; of the packages around it, the parents are imported to look inside."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, OSError, RuntimeError, AttributeError):
        return False  # a parent is missing, or does not load here


def _optional_line(package: Optional) -> str:
    if found(package.module):
        return f"{package.name:<20} {version(package.distribution) or 'found'}"
    return f"{package.name:<20} not found; used instead: {package.instead}"


def _sglang_line() -> str:
    installation = find_sglang()
    if installation is None:
        found = f"not found; used instead: the embedded Hugging Face rollout engine ({how_to_install()})"
    else:
        where = "beside the rest" if installation.folder is None else f"for CPUs, in {installation.folder}"
        wrong = "" if installation.version == SGLANG_VERSION else f"; mega_rl works with {SGLANG_VERSION} only"
        found = f"{installation.version}, {where}{wrong}"
    return f"{'sglang':<20} {found}"


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
    from mega_rl.accelerator.cpu import patches

    yield "Changes to Megatron-Core that make it run without CUDA:"
    for patch in patches():
        yield f"  {patch.name:<26} {patch.symbol}"
        yield f"  {'':<26} {patch.reason}"
