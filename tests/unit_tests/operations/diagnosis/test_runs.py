"""Real runs of four ranks, of which one is stopped, killed or loops: the last line names it and nobody else."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mega_rl.health.records import read_records
from mega_rl.operations.diagnosis.report import newest_report
from tests.helpers.selection import without
from tests.unit_tests.test_bad_inputs import write_good_inputs
from tests.unit_tests.test_signals import ENDS_WITHIN_S, STARTS_WITHIN_S, command, environment, steps_of

RANKS = 4
FAULTY = 2
TIMEOUT_S = 8.0
NAMED_WITHIN_S = TIMEOUT_S + 10.0

# Scores well until the third step, then never returns on one rank.
REWARD = f"""
import os

calls = 0

def score(prompt, response, answer):
    global calls
    calls += 1
    while calls > 2 and os.environ.get("RANK") == "{FAULTY}":
        pass
    return 1.0
"""
OURS = [sys.executable, "-m", "mega_rl.cli", "train", "--nproc-per-node", str(RANKS), "--max-restarts", "0"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", "-m",
            "mega_rl.cli", "train"]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("inputs")
    write_good_inputs(path)
    (path / "rewards.py").write_text(REWARD)
    return path


def failed_run(folder: Path, launcher: list[str], number: signal.Signals | None, *settings: str) -> tuple[str, float]:
    """(standard error, seconds from the signal to the end) of a run whose rank 2 gets a signal after step 2, if any."""
    process = subprocess.Popen(
        [*launcher, *command("trainer.run_dir=run", "trainer.steps=100000", f"trainer.timeout_s={TIMEOUT_S}")[4:],
         *settings],
        cwd=folder,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )  # fmt: skip
    pids: list[int] = []
    try:
        deadline = time.monotonic() + STARTS_WITHIN_S
        while number is not None and 2 not in steps_of(folder / "run"):
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline, "two steps take too long"
            time.sleep(0.05)
        begin = time.monotonic()
        if number is not None:
            pids = [record.pid for record in read_records(folder / "run").values()]
            os.kill(read_records(folder / "run")[FAULTY].pid, number)
            while newest_report(folder / "run") is None and time.monotonic() < begin + ENDS_WITHIN_S:
                time.sleep(0.05)
        took_s = time.monotonic() - begin
        _, errors = process.communicate(timeout=STARTS_WITHIN_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
    assert process.returncode == 1 or number == signal.SIGKILL
    return errors, took_s


def named(errors: str) -> str:
    """The last line that is an error of this package."""
    lines = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert lines, errors
    return lines[-1]


STOPPED = r"error: rank 2 \(pid \d+, \S+\) is stopped \(state T\) at .* while ranks? .* waits? for it in [\w-]+ \w+ \d+"
KILLED = r"error: rank 2 \(pid \d+, \S+\) was killed by SIGKILL, last seen"
LOOPS = r"error: rank 2 \(pid \d+, \S+\) hung in reward function score at \S*rewards\.py:\d+ in 'reward' of step \d+"
TP, DP, PP = ("engine.megatron.tp=2",), (), ("engine.megatron.pp=2",)
LOOP = ("reward.function=rewards.py:score", "reward.pool.workers=0")

CASES: dict[str, tuple[list[str], signal.Signals | None, tuple[str, ...], str]] = {
    "stopped, tp2": (OURS, signal.SIGSTOP, TP, STOPPED),
    "stopped, pp2": (OURS, signal.SIGSTOP, PP, STOPPED),
    "stopped, torchrun": (TORCHRUN, signal.SIGSTOP, TP, STOPPED),
    "killed, dp4": (OURS, signal.SIGKILL, DP, KILLED),
    "killed, pp2": (OURS, signal.SIGKILL, PP, KILLED),
    "loops in a reward": (OURS, None, (*TP, *LOOP), LOOPS),
}


@pytest.fixture
def no_traceback_of_ranks() -> Callable[[str], None]:
    def check(errors: str) -> None:
        assert "in fit" not in errors  # of the trainer; torchrun shows one of its own
        assert "gloo/transport" not in errors

    return check


@pytest.mark.parametrize(("launcher", "number", "settings", "words"), without(CASES, *CASES).values(),
                         ids=without(CASES, *CASES))  # fmt: skip
def test_the_rank_at_fault_is_named(
    folder: Path,
    no_traceback_of_ranks: Callable[[str], None],
    launcher: list[str],
    number: signal.Signals | None,
    settings: tuple[str, ...],
    words: str,
) -> None:
    """With its stack in the report, in time, and without a traceback of the ranks that did nothing wrong."""
    subprocess.run(["rm", "-rf", str(folder / "run")], check=True)
    errors, took_s = failed_run(folder, launcher, number, *settings)
    assert re.match(words, named(errors)), errors
    no_traceback_of_ranks(errors)
    report = newest_report(folder / "run")
    assert report is not None
    assert f"Stacks of rank {FAULTY}" in report[1] or number == signal.SIGKILL
    assert took_s < NAMED_WITHIN_S
