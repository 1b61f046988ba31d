"""Which releases of Megatron-Core are supported, and how another one is refused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from mega_rl.errors import UserError
from mega_rl.parallel.accelerator import prepare
from mega_rl.parallel.accelerator.megatron_core import REQUIREMENT, installed_version, problem, series_of

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize(
    ("version", "series"),
    [
        ("0.16.1", "0.16"), ("0.16.0", None), ("0.16.3", "0.16"), ("0.17.1", None), ("0.18.2", "0.18"),
        ("0.19.0rc1", "0.19"), ("0.19.2+local", "0.19"), ("0.20.0", None), ("1.0", None), ("of unknown version", None),
    ],
)  # fmt: skip
def test_release_of_a_version(version: str, series: str | None) -> None:
    assert series_of(version) == series


def test_the_requirement_is_that_of_the_releases() -> None:
    """pyproject.toml lets in what `prepare` accepts, and nothing else."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    dependencies = map(Requirement, tomllib.loads(text)["project"]["dependencies"])
    (declared,) = (each.specifier for each in dependencies if each.name == "megatron-core")
    assert declared == SpecifierSet(REQUIREMENT.removeprefix("megatron-core"))
    versions = [f"0.{minor}.{patch}" for minor in range(14, 23) for patch in range(4)]
    assert [v for v in versions if v in declared] == [v for v in versions if series_of(v)]


@pytest.fixture
def another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder first on the path, for a Megatron-Core other than the installed one."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / "megatron" / "core"


def test_the_version_is_that_of_the_source_that_an_import_takes(another: Path) -> None:
    installed = installed_version()
    another.mkdir(parents=True)
    (another / "package_info.py").write_text("MAJOR = 0\nMINOR = 20\nPATCH = 1\nPRE_RELEASE = 'rc2'\n")
    assert installed_version() == "0.20.1rc2" != installed
    assert problem() == f"megatron-core 0.20.1rc2: mega_rl needs another; run pip install '{REQUIREMENT}'"


@pytest.mark.parametrize("has_cuda", [False, True])
def test_prepare_refuses_before_anything_of_it_is_imported(
    another: Path, monkeypatch: pytest.MonkeyPatch, *, has_cuda: bool
) -> None:
    from mega_rl.parallel.accelerator import cpu

    another.mkdir(parents=True)
    (another / "package_info.py").write_text("MAJOR = 0\nMINOR = 17\nPATCH = 1\nPRE_RELEASE = ''\n")
    (another / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr(cpu, "prepare", cpu.prepare.__wrapped__)
    with pytest.raises(UserError, match=re.escape("megatron-core 0.17.1: mega_rl needs another")):
        prepare("auto")


# Packages outside the standard library that Megatron-Core asks for when a run imports it. A new name may do anything
# when it is imported.
ASKED_FOR = {
    "absl", "amp_C", "apex", "einops", "emerging_optimizers", "flash_attn", "flash_attn_3", "flash_mla",
    "flashattn_hopper", "fused_weight_gradient_mlp_cuda", "grouped_gemm", "multistorageclient",
    "nvidia_resiliency_ext", "nvtx", "transformer_engine", "triton", "yaml",
}  # fmt: skip
HOOKED = """
import sys, tokenize, traceback  # tokenize: linecache looks for it while a stack is read, from Python 3.13
class Finder:
    names = set()
    def find_spec(self, name, path=None, target=None):
        frames = [frame.filename for frame in traceback.extract_stack() if "importlib" not in frame.filename][:-1]
        if path is None and "/megatron/core/" in frames[-1]:
            self.names.add(name)
sys.meta_path.insert(0, Finder())
sys.modules.pop("wandb", None)
from mega_rl.parallel.accelerator import prepare
prepare("auto")
import mega_rl.engines.megatron, mega_rl.engines.models.build
print(*sorted(Finder.names))
"""


def test_packages_that_an_import_of_megatron_asks_for_are_known() -> None:
    done = subprocess.run([sys.executable, "-c", HOOKED], capture_output=True, text=True, check=True)
    asked = {name for name in done.stdout.split() if name not in sys.stdlib_module_names}
    assert {"apex", "flash_attn"} < asked <= ASKED_FOR


def test_ranks_do_not_import_packages_of_servers_and_trackers(tmp_path: Path) -> None:
    """Megatron-Core imports them where they are installed, and deep_ep may raise anything; others may import them."""
    for name in ("deep_ep", "flashinfer", "torch_memory_saver", "wandb"):
        (tmp_path / f"{name}.py").write_text(f"print('imported {name}')\nassert {name != 'deep_ep'}\n")
    program = (
        "import sys; from mega_rl.parallel.accelerator import prepare; prepare('auto');"
        "import mega_rl.engines.megatron; print('ready'); import flashinfer, wandb; prepare('auto', deepep=True)"
    )
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    imported = [f"imported {name}" for name in ("flashinfer", "wandb", "deep_ep")]
    assert done.stdout.splitlines() == ["ready", *imported], done.stderr
    assert done.stderr.splitlines()[-1] == (
        "mega_rl.errors.UserError: engine.megatron.moe.dispatcher=deepep: the package deep_ep does not load "
        "(AssertionError()); it needs the CUDA toolkit (CUDA_HOME, or nvcc on PATH) and pip's NCCL before any other on "
        "LD_LIBRARY_PATH; mend that, or set engine.megatron.moe.dispatcher=alltoall"
    )
