"""The whole of `mega-rl quickstart --task gsm8k`: it learns both parts of its reward and writes the report."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.selection import FULL

pytestmark = pytest.mark.skipif(not FULL, reason="make test-full: three minutes on two free cores")


@pytest.mark.parametrize("engine", ["megatron", "fsdp"])
def test_word_problems_are_learned(engine: str, tmp_path: Path) -> None:
    """From about 40 % right and half in form; the bounds leave room for other kernels and seeds."""
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "mega_rl.cli", "quickstart", "--task", "gsm8k", "--engine", engine]
    done = subprocess.run(
        [*command, "--run-dir", str(run_dir)], capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    shares = json.loads((run_dir / "summary.json").read_text())["validation"]
    assert all(after > before for before, after in shares.values()), shares
    assert shares["val/pass_at_1"][0] < 0.6
    assert shares["val/pass_at_1"][1] > 0.7
    assert shares["val/pass_at_4"][1] > shares["val/pass_at_1"][1]
    assert shares["val/reward_format"][1] > 0.95
    page = (run_dir / "report.html").read_text()
    assert "val/pass_at_4" in page
    assert "reward/format" in page
