"""Location, version and build tools of SGLang on this machine. Imports no torch.

Two ways exist. The `sglang` extra installs it with everything else (machines with CUDA). On a CPU it has its own
folder, `<environment>/sglang`, which only the server's process has on its path: PyPI's torchvision, which SGLang needs,
is a CUDA build, and transformers in the trainer's process must not find it.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mega_rl.environment import of_other_programs
from mega_rl.errors import UserError

SGLANG_VERSION = "0.5.21"  # what is installed
TESTED = (SGLANG_VERSION, "0.5.20")  # with launcher, client and weight updates
CPU_REQUIREMENTS = Path(__file__).parents[1] / "requirements-cpu.txt"
FOLDER = "sglang"  # below the environment's prefix
SYSTEM_TOOLKIT = Path("/usr/local/cuda")  # the last place where SGLang looks for nvcc


@dataclass(frozen=True)
class Installation:
    """An installation of SGLang: its folder and version."""

    version: str
    folder: Path | None  # for the server's path; None if the interpreter finds it by itself


def find_sglang(prefix: Path | None = None) -> Installation | None:
    """Return the interpreter's own SGLang, else the one in its folder below `prefix` (sys.prefix), else None."""
    folder = (Path(sys.prefix) if prefix is None else prefix) / FOLDER
    spec = importlib.util.find_spec("sglang")
    if spec is not None and spec.origin is not None:
        try:
            return Installation(importlib.metadata.version("sglang"), None)
        except importlib.metadata.PackageNotFoundError:
            return Installation("unknown", None)
    if not (folder / "sglang" / "__init__.py").is_file():
        return None
    distributions = importlib.metadata.distributions(name="sglang", path=[str(folder)])
    return Installation(next((one.version for one in distributions), "unknown"), folder)


def argument_names(installation: Installation) -> frozenset[str] | None:
    """Return the arguments in SGLang's source; None if the source is not as in 0.5.21."""
    spec = importlib.util.find_spec("sglang")
    own = Path(spec.origin).parent if spec is not None and spec.origin is not None else None
    package = installation.folder / "sglang" if installation.folder else own
    files = sorted(package.glob("srt/arg_groups/fields/*.py")) if package else []
    names = {
        entry.target.id
        for file in files
        for node in ast.parse(file.read_text("utf-8")).body
        if isinstance(node, ast.ClassDef)
        for entry in node.body
        if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name)
    }
    return frozenset(names) or None


def require_sglang(*, device: str = "") -> Installation:
    """Return the SGLang that serves on `device`: "cpu", "cuda", or "" if not known.

    Raises UserError with the command to install it, for no SGLang, another version, or on CUDA the one for CPUs.
    """
    installation = find_sglang()
    if installation is None or installation.version not in TESTED:
        there = "it is not installed" if installation is None else f"{installation.version} is installed"
        raise UserError(f"rollout.backend=sglang needs SGLang {SGLANG_VERSION}; {there}; {how_to_install(device)}")
    if device == "cuda" and installation.folder is not None:
        raise UserError(
            f"SGLang in {installation.folder} has no CUDA kernels and serves CPUs only; on a GPU machine install "
            "'mega_rl[sglang]'"
        )
    return installation


def how_to_install(device: str = "") -> str:
    """Return the command in words, for `device` as in `require_sglang`."""
    pip = f"pip install --no-deps --target {Path(sys.prefix) / FOLDER} -r {CPU_REQUIREMENTS}"
    on_cpu = f"'{pip}' installs it on a CPU"
    on_cuda = "'pip install mega_rl[sglang]' does so on a GPU machine"
    return {"cpu": on_cpu, "cuda": on_cuda}.get(device, f"{on_cpu}, {on_cuda}")


def with_tools(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with pip's programs first on PATH, and pip's nvcc as a fallback."""
    path = os.pathsep.join([str(Path(sys.executable).parent), variables.get("PATH") or os.defpath])
    given = {**variables, "PATH": path}
    toolkits = sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/cu*/bin/nvcc"))
    if toolkits and not (given.get("CUDA_HOME") or given.get("CUDA_PATH")) and not _nvcc(given).is_file():
        given["CUDA_HOME"] = str(toolkits[-1].parents[1])
    return given


def missing_tools(variables: Mapping[str, str] | None = None) -> Iterator[str]:
    """Yield the tools that a CUDA server needs to compile kernels and that are missing."""
    given = with_tools(of_other_programs() if variables is None else variables)
    if not os.access(_nvcc(given), os.X_OK):
        yield f"no compiler {_nvcc(given)}: install the CUDA toolkit or set CUDA_HOME to its folder"
    if shutil.which("ninja", path=given["PATH"]) is None:
        yield f"no program ninja in {Path(sys.executable).parent} or on PATH: pip install ninja"
    if shutil.which(compiler := given.get("CXX") or "c++", path=given["PATH"]) is None:
        yield f"no C++ compiler {compiler} on PATH: install g++, or name one in CXX"
    home = Path(given.get("HOME", "/"))
    if not os.access(home, os.W_OK | os.X_OK):
        yield f"HOME={home} is not a writable folder, and compiled kernels are kept there: set HOME to one"


def _nvcc(variables: Mapping[str, str]) -> Path:
    """Return the nvcc that SGLang would run; it may not exist."""
    home = variables.get("CUDA_HOME") or variables.get("CUDA_PATH")
    on_path = shutil.which("nvcc", path=variables["PATH"])
    return Path(on_path) if on_path and not home else Path(home or SYSTEM_TOOLKIT) / "bin" / "nvcc"
