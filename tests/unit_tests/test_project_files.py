"""Files that only services and tools read: they parse, agree with the code, and call what exists."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers import makefile
from tests.release.sources import ROOT

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
