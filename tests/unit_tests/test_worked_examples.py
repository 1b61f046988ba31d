"""Programs on pages print what the pages say, and name files in an order that exists."""

from __future__ import annotations

import contextlib
import io
import json
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


# (heading, diff, program, output) of every example of docs/extending.md
CHANGES = CHANGE.findall((DOCS / "extending.md").read_text(encoding="utf-8"))
RUN_ALL = """
import contextlib, io, json, sys
printed = []
for program in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(program, "program", "exec"), {"__name__": "program"})
    printed.append(out.getvalue())
print(json.dumps(printed))
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each program prints, by heading, in a copy of the package with all diffs applied."""
    folder, root = tmp_path_factory.mktemp("copy"), DOCS.parent
    shutil.copytree(root / "mega_rl", folder / "mega_rl")  # with byte code, whose compilation is half of the test
    shutil.copy(root / "pyproject.toml", folder)

    def run(*command: str, text: str = "") -> str:
        environment = {**os.environ, "PYTHONPATH": str(folder), "GIT_CEILING_DIRECTORIES": str(folder.parent)}
        done = subprocess.run(
            command, cwd=folder, env=environment, input=text, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    for _, diff, *_ in CHANGES:
        run("git", "apply", "-", text=diff)
        changed = re.findall(r"^\+\+\+ b/(.*)$", diff, re.M)
        assert len(changed) <= 2, "a capability is a new object in one place"
        run(sys.executable, "-m", "ruff", "check", "--quiet", *changed)
        run(sys.executable, "-m", "ruff", "format", "--quiet", "--check", *changed)
    programs = {heading: program for heading, _, program, _ in CHANGES}
    outputs = json.loads(run(sys.executable, "-c", RUN_ALL, text=json.dumps(list(programs.values()))))
    return dict(zip(programs, outputs, strict=True))


@pytest.mark.parametrize(("heading", "output"), [(c[0], c[3]) for c in CHANGES], ids=[c[0] for c in CHANGES])
def test_a_diff_applies_and_does_what_the_page_says(printed: dict[str, str], heading: str, output: str) -> None:
    assert printed[heading] == output


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
