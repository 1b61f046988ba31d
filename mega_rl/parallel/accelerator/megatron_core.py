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
import re
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from mega_rl.errors import UserError

# Series -> versions whose source was compared symbol by symbol; the tests run on the last.
RELEASES = {"0.16": ("0.16.1",), "0.18": ("0.18.0", "0.18.2"), "0.19": ("0.19.0", "0.19.2")}
REQUIREMENT = "megatron-core>=0.16.1,!=0.17.*,<0.20"  # the same in pyproject.toml


def series_of(version: str) -> str | None:
    """Return the supported series of a version such as "0.19.2" or "0.19.3rc1"; None without one."""
    numbers = _numbers(version)
    own = ".".join(map(str, numbers[:2]))
    return own if own in RELEASES and numbers >= _numbers(RELEASES[own][0]) else None


def megatron_folder() -> Path | None:
    """Return the folder "megatron" that an import would take; None without one. Imports nothing."""
    spec = PathFinder.find_spec("megatron")
    if spec is None:
        return None
    places = [Path(place) for place in spec.submodule_search_locations or ()]
    return next((place for place in places if (place / "core").is_dir()), None)


def installed_version() -> str | None:
    """Return the version of the Megatron-Core that an import would take; None where there is none.

    Reads its source, as a package's metadata may be that of another copy than the first on the path.
    """
    folder = megatron_folder()
    if folder is None:
        return None
    text = (folder / "core" / "package_info.py").read_text(encoding="utf-8")
    numbers = [re.search(rf"^{name} = (\d+)$", text, re.MULTILINE) for name in ("MAJOR", "MINOR", "PATCH")]
    suffix = re.search(r"^PRE_RELEASE = ['\"](.*)['\"]$", text, re.MULTILINE)
    return ".".join(number[1] for number in numbers if number) + (suffix[1] if suffix else "")


def problem() -> str | None:
    """Return why the installed Megatron-Core cannot be used, with the fix, or None."""
    version = installed_version()
    if version is not None and series_of(version) is not None:
        return None
    return f"megatron-core {version or 'is not installed'}: mega_rl needs another; run pip install '{REQUIREMENT}'"


def installed_series() -> str:
    """Return the series of the installed Megatron-Core, which `problem` has accepted."""
    series = series_of(installed_version() or "")
    assert series is not None, "prepare() says so of a Megatron-Core that is not supported"
    return series


def _numbers(version: str) -> tuple[int, ...]:
    """Return (0, 19, 2) of "0.19.2", "0.19.2rc1" or "0.19.2+local"."""
    matched = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in matched.group().split(".")) if matched else ()


def stable_name(tensor: str) -> str:
    """Return a parameter's or buffer's name in 0.16 and in all checkpoints.

    Later ones call the decoder layer inside a multi-token prediction layer anew.
    """
    return tensor.replace(".mtp_model_layer.", ".transformer_layer.")


def submodules_of(spec: Any) -> Any:
    """Return the submodules of a module's spec; from 0.18 specs may be partial functions."""
    return spec.keywords["submodules"] if isinstance(spec, functools.partial) else spec.submodules


def mtp_layer_field() -> str:
    """Return the field of `MultiTokenPredictionLayerSubmodules` that holds the decoder layer inside."""
    return "transformer_layer" if installed_series() == "0.16" else "mtp_model_layer"


def fsdp_gradient_dtypes(*, in_fp32: bool) -> dict[str, Any]:
    """Return fields of `DistributedDataParallelConfig` for the dtype of gradients in Megatron FSDP.

    From 0.18 it goes by these and, without a word, no longer by `grad_reduce_in_fp32`.
    """
    if installed_series() == "0.16" or not in_fp32:
        return {}
    import torch

    return {"megatron_fsdp_main_grads_dtype": torch.float32, "megatron_fsdp_grad_comm_dtype": torch.float32}


def fsdp_instance_buffers(group: Any) -> tuple[Any, Any]:
    """Return the buffers (or None) that a group of Megatron FSDP has for several optimizer instances."""
    if installed_series() == "0.16":
        return group.hsdp_wbuf, group.hsdp_gbuf
    return group.hfsdp_helper_wbuf, group.hfsdp_helper_gbuf


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
