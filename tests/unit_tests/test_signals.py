"""SIGTERM, SIGUSR1 and Ctrl-C end a run after the step in progress, with a checkpoint that a later run goes on from."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.selection import FULL, without
from tests.unit_tests.test_bad_inputs import SETTINGS, write_good_inputs

ROOT = Path(__file__).parents[2]
STARTS_WITHIN_S = 240.0
ENDS_WITHIN_S = 60.0  # a step takes a tenth of a second; the rest is for a busy machine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("inputs")
    write_good_inputs(path)
    return path


def command(*settings: str) -> list[str]:
    return [sys.executable, "-m", "mega_rl.cli", "train", *SETTINGS, *settings]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def steps_of(run: Path) -> list[int]:
    """The steps in metrics.jsonl, in order."""
    path = run / "metrics.jsonl"
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
    return [json.loads(line)["step"] for line in whole.splitlines()]


def stopped_run(folder: Path, run: str, number: signal.Signals, *launcher: str) -> tuple[int, str]:
    """(exit code, stderr) of a long run that gets a signal after step 2."""
    process = subprocess.Popen(
        command(f"trainer.run_dir={run}", "trainer.steps=100000", *launcher),
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + STARTS_WITHIN_S
        while 2 not in steps_of(folder / run):
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline, "two steps take too long"
            time.sleep(0.05)
        process.send_signal(number)
        _, errors = process.communicate(timeout=ENDS_WITHIN_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return process.returncode, errors


SIGNALS = without(
    {
        "SIGTERM to two ranks": (signal.SIGTERM, ("--nproc-per-node", "2")),
        "SIGUSR1 to two ranks": (signal.SIGUSR1, ("--nproc-per-node", "2")),
        "SIGINT": (signal.SIGINT, ()),
    },
    "SIGUSR1 to two ranks",
    "SIGINT",
)


@pytest.mark.parametrize(("number", "launcher"), SIGNALS.values(), ids=SIGNALS)
def test_a_stopped_run_can_go_on(folder: Path, number: signal.Signals, launcher: tuple[str, ...]) -> None:
    """Exit code 128 + signal; the resumed run, of one rank, adds the steps that follow and repeats none."""
    name = f"run-{number.name}"
    code, errors = stopped_run(folder, name, number, *launcher)
    assert code == 128 + number, errors
    assert "Traceback" not in errors
    done = steps_of(folder / name)[-1]
    assert errors.count(f"stopped after step {done} of 100000; the same command continues from there") == 1
    assert f"{number.name}: finishing step" in errors
    checkpoint = folder / name / "checkpoints" / f"step_{done:06d}"
    ranks = 2 if launcher else 1
    shards = [f"shard_{rank:05d}.safetensors" for rank in range(ranks)]
    assert sorted(path.name for path in checkpoint.iterdir()) == ["COMMIT", "manifest.json", *shards]
    assert [path.name for path in checkpoint.parent.glob(".*")] == [".lock"]

    if number != signal.SIGTERM and not FULL:
        return  # the checkpoint is as after SIGTERM

    resumed = subprocess.run(
        command(f"trainer.run_dir={name}", f"trainer.steps={done + 2}"),
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=STARTS_WITHIN_S,
    )
    assert resumed.returncode == 0, resumed.stderr
    assert f"resumed after step {done}" in resumed.stderr
    assert steps_of(folder / name) == list(range(1, done + 3))
