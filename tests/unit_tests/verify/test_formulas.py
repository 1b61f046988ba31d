"""The independent trainer's formulas of losses beside TRL's own functions."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.peers import package

MISSING = package.missing("trl")
CASES = "tests/unit_tests/verify/formulas_beside_trl.py"


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_losses_and_divergences_are_those_of_trl() -> None:
    """In a process of its own, the only one with TRL on its path."""
    command = [sys.executable, "-W", "ignore", "-m", "pytest", "-p", "no:cacheprovider", CASES]
    environment = {**package.environment(), "PYTEST_ADDOPTS": ""}
    process = subprocess.run(command, env=environment, cwd=package.ROOT, capture_output=True, text=True, timeout=240)
    assert process.returncode == 0, process.stdout + process.stderr
    assert "11 passed in" in process.stdout.splitlines()[-1]
