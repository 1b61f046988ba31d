"""The worked example of docs/converters.md: its diff, applied to a copy of the code, gives a family that trains."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mega_rl.converters.families import FAMILIES
from tests.helpers.models import TINY
from tests.helpers.selection import FULL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 300
WRITE = """
import sys
from pathlib import Path
from tests.helpers.models import write_tiny_checkpoint
write_tiny_checkpoint(Path(sys.argv[1]), family="ministral", tied=False)
"""


def example() -> str:
    """The diff on the page."""
    blocks = re.findall(r"^```diff\n(.*?)^```", (ROOT / "docs/converters.md").read_text("utf-8"), re.M | re.S)
    assert len(blocks) == 1
    return blocks[0]


def run(folder: Path, *command: str, text: str = "") -> subprocess.CompletedProcess[str]:
    """The outcome of a program that sees the code in this folder alone."""
    paths = {"PYTHONPATH": str(folder), "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    env = os.environ | {"OMP_NUM_THREADS": "1"} | paths
    return subprocess.run(command, cwd=folder, env=env, input=text, capture_output=True, text=True, timeout=TIMEOUT_S)


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the code and pages with the diff applied and the pages written anew."""
    folder = tmp_path_factory.mktemp("copy")
    for name in ("mega_rl", "tests", "docs"):
        shutil.copytree(ROOT / name, folder / name)  # with byte code, whose compilation is half of the test
    for name in ("README.md", "README.zh-CN.md", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / name)
    assert len(re.findall(r"^\+\+\+ b/mega_rl/", example(), re.M)) <= 2, "a family is an entry in one place"
    applied = run(folder, "git", "apply", "-", text=example())
    assert applied.returncode == 0, applied.stderr
    written = run(folder, sys.executable, "-m", "tests.code_tables")
    assert written.returncode == 0, written.stderr
    return folder


def mega_rl(folder: Path, *arguments: str) -> Any:
    """The JSON object that the command prints."""
    outcome = run(folder, sys.executable, "-m", "mega_rl.cli", *arguments, "--json")
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    return json.loads(outcome.stdout)


def test_the_diff_applies_and_the_pages_have_it(patched: Path) -> None:
    assert "ministral" not in FAMILIES.keys() | TINY.keys()
    assert "| `ministral` | Ministral | a sliding window in the" in (patched / "docs/converters.md").read_text("utf-8")


@pytest.mark.skipif(not FULL, reason="make test-full: a minute and a half")
def test_it_converts_and_trains(patched: Path) -> None:
    """Its own tests, every bit, and its card: transformers' logits and gradients on both engines."""
    files = [f"tests/unit_tests/{name}" for name in ("converters", "rollout/test_families.py")]
    chosen = "ministral or (test_family_entries and not naming)"
    outcome = run(patched, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, *files)
    assert outcome.returncode == 0, outcome.stdout[-4000:]
    checkpoint = str(patched / "checkpoint")
    assert run(patched, sys.executable, "-c", WRITE, checkpoint).returncode == 0
    assert mega_rl(patched, "convert", "verify", checkpoint)["equal"]
    card = mega_rl(patched, "card", checkpoint, "--layouts", "tp2,pp2")
    assert [layout["name"] for layout in card["layouts"]] == ["1", "fsdp1", "tp2", "pp2", "fsdp2"]
    assert card["good"], card["proofs"]
