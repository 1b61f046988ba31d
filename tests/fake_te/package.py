"""Folder with the Python of Transformer Engine, which `make te` fills and only `program` puts on its path."""

from __future__ import annotations

import os
from pathlib import Path

from mega_rl.parallel.accelerator import megatron_core

ROOT = Path(__file__).parents[2]
REQUIREMENTS = Path(__file__).with_name("requirements.txt")
FOLDER = ROOT / ".venv" / "te"
MEGATRON = "0.16"  # the release that the pinned one is for


def release() -> str:
    """Return the pinned release, as "2.11.0"."""
    (line,) = REQUIREMENTS.read_text(encoding="utf-8").split()
    return line.partition("==")[2]


def missing() -> str | None:
    """Return why the tests of Transformer Engine cannot run here, or None."""
    series = megatron_core.installed_series()
    if series != MEGATRON:
        return f"transformer-engine {release()} is what Megatron-Core {MEGATRON} asks for, and this is {series}"
    if (FOLDER / f"transformer_engine-{release()}.dist-info").is_dir():
        return None
    return f"{FOLDER} has no transformer-engine {release()}: `make te` puts its Python there, 4 MB without a build"


def environment() -> dict[str, str]:
    """Return the environment of a program that imports it."""
    path = os.pathsep.join(filter(None, [str(FOLDER), str(ROOT), os.environ.get("PYTHONPATH")]))
    return {
        **os.environ,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "NVTE_PROJECT_BUILDING": "1",  # import without the compiled libraries
        "NVTE_TORCH_COMPILE": "1",  # late, when first called; without it torch.jit compiles at import
        "TORCHDYNAMO_DISABLE": "1",  # and torch.compile returns what it is given
    }
