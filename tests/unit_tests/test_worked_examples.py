"""Programs on pages print what the pages say, and name files in an order that exists."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
CHANGE = re.compile(r"^## (.*?)\n.*?^```diff\n(.*?)^```\n+```python\n(.*?)^```\n+```text\n(.*?)^```", re.M | re.S)
EXAMPLE = re.compile(r"^```python\n([^`]*)^```\n+```text\n(.*?)^```", re.MULTILINE | re.DOTALL)


def examples() -> list[tuple[str, str, str]]:
    """(page, program, output) of every program whose output follows it."""
    return [
        (page.name, *groups)
        for page in sorted(DOCS.glob("*.md"))
        if page.name != "extending.md"
        for groups in EXAMPLE.findall(page.read_text(encoding="utf-8"))
    ]


@pytest.mark.parametrize(("page", "program", "output"), examples(), ids=[name for name, _, _ in examples()])
def test_a_program_prints_what_the_page_says(page: str, program: str, output: str) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program, page, "exec"), {"__name__": page})
    assert printed.getvalue() == output


def changes() -> list[tuple[str, str, str, str]]:
    """(heading, diff, program, output) of every example of docs/extending.md."""
    return CHANGE.findall((DOCS / "extending.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("diff", "program", "output"), [c[1:] for c in changes()], ids=[c[0] for c in changes()])
def test_a_diff_applies_and_does_what_the_page_says(tmp_path: Path, diff: str, program: str, output: str) -> None:
    root = DOCS.parent
    shutil.copytree(root / "mega_rl", tmp_path / "mega_rl", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(root / "pyproject.toml", tmp_path)

    def run(*command: str, text: str = "") -> str:
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, input=text, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("git", "apply", "-", text=diff)
    changed = re.findall(r"^\+\+\+ b/(.*)$", diff, re.M)
    assert len(changed) <= 2, "a capability is a new object in one place"
    run(sys.executable, "-m", "ruff", "check", "--quiet", *changed)
    run(sys.executable, "-m", "ruff", "format", "--quiet", "--check", *changed)
    assert run(sys.executable, "-c", program) == output


def test_names_beside_a_file_are_in_it() -> None:
    """Functions and classes that a row of a table names stand in one of the row's files."""
    rows = [line for line in (DOCS / "lives.md").read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    checked = 0
    for row in rows:
        files = [DOCS.parent / name for name in re.findall(r"`(mega_rl/[\w/]+\.py)`", row)]
        text = "".join(file.read_text(encoding="utf-8") for file in files)
        for name in re.findall(r"`([A-Z]\w+|[a-z]+_\w+)(?:\.\w+\(\w+\))?`", row) if files else []:
            assert re.search(rf"\b{name}\b", text), f"{name} is not in {files}"
            checked += 1
    assert checked > 1
