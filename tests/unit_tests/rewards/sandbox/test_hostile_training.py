"""A run whose answers are hostile programs loses no step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.sandboxes import local_sandbox
from tests.helpers.selection import FULL
from tests.hostile_programs.campaign import PROGRAMS
from tests.hostile_programs.training import train

TAKEN = (
    "processes: sessions of their own",
    "memory: one block",
    "output: lines",
    "time: all signals ignored",
    "other processes: kill the parent outside",
    "forged verdicts of asserts: kill the parent",
    "forged results of calls: sys.exit as the function is called",
    "forged output: right, and an error",
)


@pytest.mark.skipif(not FULL, reason="most of a minute: make test-full, and all of it in make campaign-sandbox")
def test_hostile_answers_cost_no_step(tmp_path: Path) -> None:
    local_sandbox()
    programs = [program for program in PROGRAMS if program.title in TAKEN]
    assert len(programs) == len(TAKEN)
    ended = train(tmp_path, programs, prompts=2)
    assert (ended.exit_code, ended.steps, ended.reached) == (0, 4, ()), ended.log
    assert ended.passed == 0
    assert ended.failures == {"timeouts": 0, "crashes": 0, "errors": 0}
