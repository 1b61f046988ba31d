"""run_all.sh: what it runs, and that a failure of any rank is its own. A copy of it runs programs made for this."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.selection import FULL

pytestmark = pytest.mark.skipif(not FULL, reason="make test-full: three launches of a script")
FOLDER = Path("tests") / "special_distributed"
SCRIPT = Path(__file__).parents[3] / FOLDER / "run_all.sh"

NOTED = """
import os, pathlib, sys
folder = pathlib.Path(os.environ["TMPDIR"])
assert folder.is_dir() and os.environ["WORLD_SIZE"] == "4"
print(f"here {folder}" if os.environ["RANK"] == "0" else "")
pathlib.Path(sys.argv[0] + ".rank" + os.environ["RANK"]).touch()
"""
FAILS_ON_ONE = NOTED + 'sys.exit(5 if os.environ["RANK"] == "2" else 0)'


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / FOLDER
    folder.mkdir(parents=True)
    shutil.copy(SCRIPT, folder)
    for name, text in {"test_a": NOTED, "test_b": FAILS_ON_ONE, "test_c": NOTED, "program": FAILS_ON_ONE}.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    return folder


def run_all(project: Path, *programs: str, python: Path | None = None, **environment: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr), from a folder that is not the project's."""
    first = python or Path(sys.executable).parent
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # of another `tests`
    done = subprocess.run(
        ["bash", str(project / "run_all.sh"), *programs],
        cwd=project,
        env={**inherited, "PATH": f"{first}:{os.environ['PATH']}", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_one_rank_that_fails_ends_all(project: Path) -> None:
    code, out, err = run_all(project)
    assert code == 1, err  # torchrun's
    assert [line.partition(" in ")[0] for line in out.splitlines() if line.startswith("passed")] == ["passed test_a"]
    assert "FAILED test_b after" in err
    assert "exit code 1" in err
    assert "exitcode  : 5" in err
    assert len(list(project.glob("test_a.py.rank?"))) == 4
    assert not list(project.glob("test_c.py.rank?")), "it went on"
    temporary = {line.partition("here ")[2] for line in out.splitlines() if line.startswith("here ")}
    assert len(temporary) == 1
    assert not Path(temporary.pop()).exists(), "the temporary folder is left"


def test_programs_are_chosen_by_name(project: Path) -> None:
    code, out, err = run_all(project, "test_c")
    assert code == 0, err
    assert "all 1 passed" in out
    assert {path.name for path in project.glob("*.rank?")} == {f"test_c.py.rank{rank}" for rank in range(4)}
    code, out, err = run_all(project, "test_c", "test_d")
    assert (code, out) == (2, "")
    assert err == "error: test_d: there is no tests/special_distributed/test_d.py\n"


def test_a_program_has_a_deadline(project: Path, tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"  # hangs instead of torchrun
    python.parent.mkdir()
    python.write_text("#!/bin/sh\nexec sleep 100\n", encoding="utf-8")
    python.chmod(0o755)
    code, out, err = run_all(project, "test_a", python=python.parent, DEADLINE_S="1")
    assert (code, out) == (124, "")
    assert "FAILED test_a after" in err
    assert "not done within 1 s" in err
