"""A conversion that is killed leaves nothing that looks like a checkpoint, and the next one is not in its way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mega_rl.cli.app import main
from mega_rl.converters.offline.checkpoint import open_checkpoint
from mega_rl.errors import UserError
from tests.helpers.models import write_tiny_checkpoint
from tests.helpers.selection import FULL

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of some 200 MB, almost all of it embedding and head: time enough to be killed in."""
    return write_tiny_checkpoint(
        tmp_path_factory.mktemp("source") / "hf", family="qwen3", tied=False, vocab_size=400_000, hidden_size=64
    )


@pytest.mark.skipif(not FULL, reason="make test-full: ten seconds for each command")
@pytest.mark.parametrize("verb", ["import", "export"])
def test_killed_in_the_middle(source: Path, tmp_path: Path, verb: str) -> None:
    """SIGKILL as soon as there is something on disk."""
    origin, target = source, tmp_path / "out"
    if verb == "export":
        origin = tmp_path / "dist"
        assert main(["convert", "import", str(source), str(origin)]) == 0
    before = set(tmp_path.iterdir())
    arguments = ["convert", verb, str(origin), str(target), "--jobs", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-m", "mega_rl.cli", *arguments], env=environment)
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        if any(file.stat().st_size for new in set(tmp_path.iterdir()) - before for file in new.rglob("*.*")):
            break
        time.sleep(0.0005)
    process.send_signal(signal.SIGKILL)
    assert process.wait(timeout=60) == -signal.SIGKILL, "it ended before it could be killed"
    assert not target.exists()
    left = set(tmp_path.iterdir()) - before
    assert all(folder.name.startswith(".") for folder in left)
    for folder in left:
        with pytest.raises(UserError):
            open_checkpoint(folder)
    assert main(arguments) == 0
    assert main(["convert", "verify", str(source), str(target)]) == 0
