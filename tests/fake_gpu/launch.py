"""Launcher of the program that runs cases on the fake device, which must be installed before torch is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TIMEOUT_S = 280.0


def reports_of(arguments: Sequence[str]) -> list[dict[str, Any]]:
    """Return the program's report of each argument, in order; a case that failed has its traceback under "error"."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.fake_gpu.program", *arguments],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(reports) == len(arguments), done.stderr[-3000:]
    return reports
