"""The compiled part of the fake device: built once with torch's headers, and loaded before torch."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("guard.cpp")
CACHE = Path(__file__).parents[2] / ".fake_gpu"


def missing() -> str | None:
    """Return why the fake device cannot be built here, or None."""
    if importlib.metadata.version("torch").partition("+")[2] != "cpu":
        return "torch is built for a real accelerator, which the fake device would stand in front of"
    return None if _compiler() else "there is no C++ compiler (c++, g++ or clang++) to build the fake device with"


def build() -> Path:
    """Return the shared library, compiled unless this source was compiled for this torch before."""
    torch = _torch_folder()
    key = hashlib.sha256(SOURCE.read_bytes() + importlib.metadata.version("torch").encode()).hexdigest()[:16]
    library = CACHE / f"guard-{key}.so"
    if library.exists():
        return library
    compiler = _compiler()
    assert compiler is not None, missing()
    CACHE.mkdir(exist_ok=True)
    partial = library.with_suffix(".partial")
    command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{torch / 'include'}", str(SOURCE)]
    command += [f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10", "-o", str(partial)]
    subprocess.run(command, check=True)
    partial.rename(library)
    return library


def load(library: Path) -> None:
    """Put the device into this process, which must not have imported torch: it looks its hooks up only once."""
    folder = _torch_folder() / "lib"
    for name in ("libgomp*", "libc10.so", "libtorch_cpu.so"):
        for path in sorted(folder.glob(name)):
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL).set_guard()


def _compiler() -> str | None:
    return next((path for path in map(shutil.which, ("c++", "g++", "clang++")) if path), None)


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent
