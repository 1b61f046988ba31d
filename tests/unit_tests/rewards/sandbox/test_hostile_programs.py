"""Hostile programs in the sandbox: some of each family here, all in `make campaign-sandbox` and `make test-full`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from mega_rl.rewards.sandbox import Execution
from tests.helpers.sandboxes import local_sandbox
from tests.helpers.selection import FULL
from tests.hostile_programs.campaign import LIMITS, PROGRAMS, Canaries, canaries, run_program, table
from tests.hostile_programs.programs import Hostile

FAMILIES = list(dict.fromkeys(program.family for program in PROGRAMS))
# The fiercest of each kind, of which another one is always taken, and one by lot of each family.
ALWAYS = (
    "processes: fork without end", "memory: forked hogs", "disk: many files", "output: both",
    "sockets: tcp to loopback",
    "paths: by the first's root", "other processes: kill the parent outside", "environment: all readable files",
    "system calls: clone3 into a user namespace", "forged verdicts of asserts: memory of the parent",
    "shadowed builtins: set as function", "shadowed builtins: abs as import *", "shadowed modules: math as class",
    "own helpers of right programs: sum as function", "exceptions and objects: StopIteration in map",
    "exceptions and objects: __contains__", "exceptions and objects: an emptied list",
    "exceptions and objects: an AssertionError that is caught", "right programs: a TestCase", "right programs: async",
    "right programs: a function of a builtin's name", "right programs: text 10",
    "right programs: a generator", "kernel memory: pairs of datagrams",
)  # fmt: skip


def some() -> list[Hostile]:
    """Return all programs, or in `make test` those of ALWAYS and one of each family, the same ones each time."""
    chosen = {random.Random(name).choice([one for one in PROGRAMS if one.family == name]).title for name in FAMILIES}
    return [program for program in PROGRAMS if FULL or program.title in chosen | set(ALWAYS)]


@pytest.fixture(scope="module")
def own() -> Iterator[Canaries]:
    with canaries() as made:
        yield made


@pytest.mark.parametrize("program", some(), ids=lambda program: program.title)
def test_no_hostile_program_escapes(program: Hostile, own: Canaries) -> None:
    report = run_program(local_sandbox(**vars(LIMITS)), program, own)
    assert report.escapes == ()
    assert report.peak_bytes < 3 * LIMITS.memory_bytes


def test_the_programs_are_many_and_differ() -> None:
    assert len(PROGRAMS) >= 600
    assert len({(one.text, one.kind, repr(one.tests), repr(one.row)) for one in PROGRAMS}) == len(PROGRAMS)
    assert len({program.title for program in PROGRAMS}) == len(PROGRAMS)
    titles = {program.title for program in PROGRAMS}
    assert set(ALWAYS) <= titles


class Unlocked:
    """A sandbox that is none, for programs that harm nobody: it shows that the canaries sing."""

    def run(self, program: str, stdin: bytes, *, timeout_s: float) -> Execution:
        import subprocess
        import sys

        ran = subprocess.run([sys.executable, "-c", program], input=stdin, capture_output=True, timeout=20, check=False)
        return Execution("finished", ran.returncode, ran.stdout, ran.stderr)


@pytest.mark.parametrize(
    ("title", "why"),
    [
        ("sockets: tcp to loopback", "the tcp listener was reached"),
        ("sockets: a path's", "the unix listener was reached"),
        ("sockets: an abstract one", "the abstract listener was reached"),
        ("paths: the secret", "the program succeeded"),
        ("environment: variables", "the secret was read"),
        ("other processes: ask for the parent outside", "the program succeeded"),
    ],
)
def test_without_a_sandbox_the_canaries_are_reached(title: str, why: str, own: Canaries) -> None:
    (program,) = [one for one in PROGRAMS if one.title == title]
    assert any(why in escape for escape in run_program(Unlocked(), program, own).escapes)


def test_a_changed_file_is_an_escape(tmp_path: Path) -> None:
    with canaries() as fresh:
        write = Hostile("paths", "write", "open({secret_file!r}, 'w').write('x')")
        report = run_program(Unlocked(), write, fresh)
        assert report.escapes == ("a file outside was changed",)
    assert list(table([report]))[-1].startswith("| **all** | 1 | 1 exit code 0 | 0 | 0 | 0 | 1 |")
