"""Files that only services and tools read: they parse, agree with the code, and call what exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers import makefile
from tests.release.sources import ROOT
from tests.upstream import fetch

GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))

workflows = pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)


def steps_of(workflow: Path) -> list[dict[str, Any]]:
    jobs = yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"]
    return [step for job in jobs.values() for step in job["steps"]]


@workflows
def test_a_workflow_may_only_read_and_ends(workflow: Path) -> None:
    content = yaml.safe_load(workflow.read_text(encoding="utf-8"))
    assert content.keys() == {"name", True, "permissions", "env", "jobs"}  # YAML 1.1 reads the key `on` as true
    assert content["name"] == workflow.stem
    assert content["permissions"] == {"contents": "read"}
    assert all(0 < job["timeout-minutes"] <= 120 for job in content["jobs"].values())


@workflows
def test_a_workflow_calls_what_exists(workflow: Path) -> None:
    steps = steps_of(workflow)
    assert steps
    assert all(step.keys() <= {"name", "uses", "with", "run", "env", "if"} for step in steps)
    assert all(re.fullmatch(r"actions/[a-z-]+@v\d+", step["uses"]) for step in steps if "uses" in step)
    commands = "\n".join(step["run"] for step in steps if "run" in step)
    assert set(re.findall(r"\bmake ([a-z-]+)", commands)) <= makefile.targets()
    named = re.findall(r"(?<![\w/.-])(?:tests|scripts|mega_rl|docs)/[\w./-]*\w", commands)
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_supported_python_is_checked() -> None:
    supported = re.findall(r'Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    checked = re.findall(r'"(3\.\d+)"', (GITHUB / "workflows" / "wheel.yml").read_text(encoding="utf-8"))
    assert checked == supported


def test_files_named_by_makefile_targets_exist() -> None:
    show = ["make", "-s", "--eval", "shown: ; @echo $(MEGATRON_TESTS) $(VERSIONS_TESTS)", "shown"]
    shown = subprocess.run(show, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert len(shown) > 15
    assert [name for name in shown if not (ROOT / name).exists()] == []


def test_make_takes_the_newest_python_that_runs(tmp_path: Path) -> None:
    """A shim of pyenv that names no interpreter is passed over; PYTHON is taken as it is."""
    own, pyenv = tmp_path / "bin", tmp_path / "pyenv" / "versions" / "3.13.2" / "bin"
    broken, running = "#!/bin/sh\nexit 127\n", f'#!/bin/sh\nexec {sys.executable} "$@"\n'

    def put(folder: Path, name: str, text: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)

    def chosen(*arguments: str) -> str:
        command = ["make", "-s", "--eval", "shown: ; @echo $(PYTHON)", "shown", *arguments]
        variables = {"PATH": f"{own}:/usr/bin:/bin", "HOME": str(tmp_path), "PYENV_ROOT": str(tmp_path / "pyenv")}
        done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    put(own, "python3", running)
    put(own, "python3.13", broken)
    put(own, "python3.12", broken)
    assert chosen() == "python3"
    put(pyenv, "python3", running)
    assert chosen() == str(pyenv / "python3")
    put(own, "python3.12", running)
    assert chosen() == "python3.12"
    put(own, "python3.13", running)
    assert chosen() == "python3.13"
    assert chosen("PYTHON=other") == "other"


@pytest.mark.parametrize(
    ("installed", "word", "version"),
    [("0.16", "other", "0.19.2"), ("0.19", "other", "0.16.1"), ("0.19", "newest", "0.19.2")],
)
def test_newest_tests_the_other_release(
    installed: str, word: str, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "installed_series", lambda: installed)
    assert fetch.named(word) == version
