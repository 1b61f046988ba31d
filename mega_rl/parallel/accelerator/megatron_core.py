"""Supported releases of Megatron-Core, and the differences between their interfaces.

Three places know that releases differ, and all of them are listed in docs/versions.md:

- `RELEASES`: which versions are supported; every other one is refused before Megatron-Core is imported.
- `accelerator.patches`: the changes that a CPU needs, with a hash of the upstream source for each release.
- The functions at the end of this file, which the layers above call where two releases want different things.

Importing this file imports neither torch nor Megatron-Core.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import logging
import re
import sys
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from mega_rl.errors import UserError


@dataclass(frozen=True)
class Release:
    """One series of releases, such as 0.19."""

    series: str
    compared: tuple[str, ...]  # versions whose source was compared symbol by symbol; the tests run on the last
    python: tuple[int, int]  # the oldest that the wheel installs on


RELEASES = (
    Release("0.16", compared=("0.16.1",), python=(3, 10)),
    Release("0.18", compared=("0.18.0", "0.18.2"), python=(3, 12)),
    Release("0.19", compared=("0.19.0", "0.19.2"), python=(3, 12)),
)

REQUIREMENT = "megatron-core>=0.16.1,!=0.17.*,<0.20"  # as in pyproject.toml


def supported() -> str:
    """The supported versions in words."""
    names = [r.compared[0] if len(r.compared) == 1 else f"{r.series} (from {r.compared[0]})" for r in RELEASES]
    return f"{', '.join(names[:-1])} and {names[-1]}"


def release_of(version: str) -> Release | None:
    """The supported release that a version such as "0.19.2" or "0.19.3rc1" belongs to; None if there is none."""
    numbers = _numbers(version)
    for release in RELEASES:
        if _numbers(release.series)[:2] == numbers[:2] and numbers >= _numbers(release.compared[0]):
            return release
    return None


def megatron_folder() -> Path | None:
    """The folder "megatron" that an import would take; None where there is none. Nothing is imported."""
    spec = PathFinder.find_spec("megatron")
    if spec is None:
        return None
    places = [Path(place) for place in spec.submodule_search_locations or ()]
    return next((place for place in places if (place / "core").is_dir()), None)


def installed_version() -> str | None:
    """Version of the Megatron-Core that an import would take; None where there is none.

    Reads its source, as a package's metadata may be that of another copy than the first on the path.
    """
    folder = megatron_folder()
    if folder is None:
        return None
    try:
        text = (folder / "core" / "package_info.py").read_text(encoding="utf-8")
    except OSError:
        text = ""
    numbers = [re.search(rf"^{name} = (\d+)$", text, re.MULTILINE) for name in ("MAJOR", "MINOR", "PATCH")]
    suffix = re.search(r"^PRE_RELEASE = ['\"](.*)['\"]$", text, re.MULTILINE)
    if all(numbers):
        version = ".".join(number.group(1) for number in numbers if number is not None)
        return version + (suffix.group(1) if suffix else "")
    try:
        return importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def problem() -> str | None:
    """Return why the installed Megatron-Core cannot be used (version, rule and fix), or None."""
    version = installed_version()
    if version is None:
        return f"megatron-core is not installed; pip install {advice()}"
    if release_of(version) is None:
        return f"megatron-core {version}: mega_rl runs with {supported()}; pip install {advice()}"
    return None


def installed_release() -> Release:
    """The release of the installed Megatron-Core, which `problem` has accepted."""
    release = release_of(installed_version() or "")
    assert release is not None, "prepare() says so of a Megatron-Core that is not supported"
    return release


def advice() -> str:
    """Requirement of the newest version that this Python can install."""
    fitting = [release for release in RELEASES if sys.version_info >= release.python]
    return f"megatron-core=={fitting[-1].compared[-1]}"


def _numbers(version: str) -> tuple[int, ...]:
    """(0, 19, 2) of "0.19.2", "0.19.2rc1" or "0.19.2+local"."""
    matched = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in matched.group().split(".")) if matched else ()


def stable_name(tensor: str) -> str:
    """Return the name of a parameter or buffer in 0.16, and in the checkpoints of all releases.

    Later ones call the decoder layer inside a multi-token prediction layer anew.
    """
    return tensor.replace(".mtp_model_layer.", ".transformer_layer.")


def submodules_of(spec: Any) -> Any:
    """The submodules that a spec of a module names; from 0.18 upstream's own specs may be partial functions."""
    return spec.keywords["submodules"] if isinstance(spec, functools.partial) else spec.submodules


def mtp_layer_field() -> str:
    """Field of `MultiTokenPredictionLayerSubmodules` that holds the decoder layer inside."""
    return "transformer_layer" if installed_release().series == "0.16" else "mtp_model_layer"


def fsdp_gradient_dtypes(*, in_fp32: bool) -> dict[str, Any]:
    """Fields of `DistributedDataParallelConfig` for the dtype in which Megatron FSDP keeps and sends gradients.

    From 0.18 it goes by these and, without a word, no longer by `grad_reduce_in_fp32`.
    """
    if installed_release().series == "0.16" or not in_fp32:
        return {}
    import torch

    return {"megatron_fsdp_main_grads_dtype": torch.float32, "megatron_fsdp_grad_comm_dtype": torch.float32}


def fsdp_instance_buffers(group: Any) -> tuple[Any, Any]:
    """Buffers of weights and gradients that a group of Megatron FSDP has for several optimizer instances, or None."""
    if installed_release().series == "0.16":
        return group.hsdp_wbuf, group.hsdp_gbuf
    return group.hfsdp_helper_wbuf, group.hfsdp_helper_gbuf


_ADVICE = {  # logger below megatron.core -> start of a message that asks for nothing here
    "distributed.distributed_data_parallel": "DistributedDataParallel: full_param_layout not provided",
    "models.gpt.gpt_model": "GPTModel IS DEPRECATED",
    "transformer.transformer_layer": "Rewrapping ModuleSpec with module",
}


# Megatron-Core imports these where it can, and no run needs them. Each costs every rank: W&B and flashinfer take
# seconds, torch_memory_saver sets its mode, and SGLang's deep_ep asserts a CUDA toolkit and pip's NCCL at its import.
_HIDDEN = ("wandb", "deep_ep", "flashinfer", "torch_memory_saver")


def load(*, deepep: bool = False) -> None:
    """Import Megatron-Core without the packages of `_HIDDEN`; deepep: `deep_ep` first, or a UserError says why not."""
    if deepep:
        try:
            importlib.import_module("deep_ep")
        except (ImportError, AssertionError, OSError, RuntimeError) as error:
            raise UserError(
                f"engine.megatron.moe.dispatcher=deepep: the package deep_ep does not load ({error!r}); it needs the "
                "CUDA toolkit (CUDA_HOME, or nvcc on PATH) and pip's NCCL before any other on LD_LIBRARY_PATH; mend "
                "that, or set engine.megatron.moe.dispatcher=alltoall"
            ) from error
    modules = cast("dict[str, ModuleType | None]", sys.modules)
    hidden = [name for name in _HIDDEN if name not in modules]
    modules.update(dict.fromkeys(hidden))  # an import of None raises ImportError
    try:
        for module in ("megatron.core", "megatron.core.models.gpt"):
            importlib.import_module(module)
    finally:
        for name in hidden:
            del modules[name]


@functools.cache
def silence_advice() -> None:
    """Filter what newer releases log of every model that is described as 0.16 wants it, and that runs as it should."""
    for name, start in _ADVICE.items():
        logging.getLogger(f"megatron.core.{name}").addFilter(functools.partial(_is_other, start))


def _is_other(start: str, record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(start)
