"""The benchmark of a GPU, on a CPU with tiny shapes: every part runs and gives the figures that are expected of it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.distributed import run_ranks

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run_all_parts(rank: int, folder: str) -> list[dict[str, Any]]:
    """Return the records of all parts, which run in this process."""
    sys.path.insert(0, folder)
    import device  # type: ignore[import-not-found]

    output = io.StringIO()
    with redirect_stdout(output):
        device.work(list(device.PARTS), tiny=True)
    return [json.loads(line) for line in output.getvalue().splitlines() if line.startswith('{"part"')]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import device

    return device


def test_every_part_gives_the_figures_that_are_expected_of_it(device: Any) -> None:
    (records,) = run_ranks(1, run_all_parts, str(BENCHMARKS), timeout_s=120)
    assert {record["part"] for record in records} == set(device.PARTS)
    figures = {(record["part"], key) for record in records for key in record}
    missing = {(one.part, one.key) for one in device.EXPECTED} - figures
    assert missing <= {("ipc", "gb_s"), ("ipc", "left_bytes"), ("rollout", "ms_per_token")}, "these need a GPU's shapes"
    assert len(device.table(records, judge=True).splitlines()) == len(records) + 2


def test_a_part_runs_as_a_program_and_an_unknown_one_is_refused(tmp_path: Path) -> None:
    program = [sys.executable, str(BENCHMARKS / "device.py"), "--tiny", "--json", str(tmp_path / "device.json")]
    done = subprocess.run([*program, "machine"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bf16_tflops" in json.loads((tmp_path / "device.json").read_text())["records"][1]
    refused = subprocess.run([*program, "heads"], capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 2
    assert "no part heads; there are machine, tests, step, head" in refused.stderr
