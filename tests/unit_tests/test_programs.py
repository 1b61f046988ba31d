"""Programs of the package: none of them runs a file of the working folder that is named like a module."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mega_rl.environment import python_module
from tests.house import PACKAGE

START_S = 120.0  # for imports of a few seconds
# Programs that `python_module` starts; those of users' launches are `mega_rl.cli`.
PROGRAMS = (
    "mega_rl.cli",
    "mega_rl.cli.launch",
    "mega_rl.operations.launcher.ranks",
    "mega_rl.processes",
    "mega_rl.rewards.pool_worker",
    "mega_rl.rollout.sglang.server.launcher",
    "mega_rl.verify.launcher",
)
# The harness starts the candidate of a sandbox, whose folder holds nothing else.
STARTS_PYTHON_ITSELF = ["environment.py"]
# Modules that each program imports, and one that libraries try to.
NAMES = [
    "argparse",
    "contextlib",
    "ctypes",
    "h2",
    "json",
    "logging",
    "queue",
    "random",
    "signal",
    "socket",
    "subprocess",
]


@pytest.fixture
def poisoned(tmp_path: Path) -> Path:
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write(__name__ + ' ')\n")
    return tmp_path


def test_no_program_runs_a_file_of_the_working_folder(poisoned: Path) -> None:
    variables = {name: value for name, value in os.environ.items() if name != "RANK"}
    started = [
        subprocess.Popen(
            python_module(program), cwd=poisoned, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for program in PROGRAMS
    ]  # fmt: skip
    for process in started:
        process.wait(START_S)
    assert not (poisoned / "ran").exists(), (poisoned / "ran").read_text()


def test_without_the_helper_the_files_run(poisoned: Path) -> None:
    subprocess.run([sys.executable, "-m", "mega_rl.cli.launch"], cwd=poisoned, stderr=subprocess.DEVNULL, check=False)
    assert (poisoned / "ran").exists()


def test_only_the_helper_writes_commands_of_python() -> None:
    files, modules = [], set()
    for path in sorted(PACKAGE.rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text("utf-8"))))
        lists = [node.elts for node in nodes if isinstance(node, ast.List | ast.Tuple) and node.elts]
        by_itself = any(ast.unparse(first) == "sys.executable" for first, *_ in lists)
        if by_itself or any(isinstance(node, ast.Constant) and node.value == "-m" for node in nodes):
            files.append(path.relative_to(PACKAGE).as_posix())
        calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "python_module"]
        modules |= {call.args[0].value for call in calls if isinstance(call.args[0], ast.Constant)}
    assert files == STARTS_PYTHON_ITSELF
    assert modules <= {*PROGRAMS}
