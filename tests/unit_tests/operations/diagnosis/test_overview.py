"""`mega-rl doctor --run`: a live run, its end, and folders that are none."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mega_rl.cli import app as cli
from mega_rl.operations.observations import find_py_spy, observe, read_stacks, write_report
from mega_rl.tracking.health.records import LastWords, health_folder, state_and_start, write_record
from tests.unit_tests.operations.diagnosis.examples import call, record

SLEEPER = "import time\ndef nap():\n    print(flush=True)\n    time.sleep(600)\nnap()"


@pytest.fixture
def pid() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
    finally:
        process.kill()
        process.communicate()


def write_living(run: Path, pid: int) -> None:
    """Rank 0 is a process of this host; rank 1 is on another and silent."""
    here = {"pid": pid, "started": state_and_start(pid)[1], "host": socket.gethostname(), "beat": time.time()}
    write_record(run, record(0, world_size=3, waiting=call("dp", 17, 0, 1), **here))
    write_record(run, record(1, world_size=3, beat=time.time() - 100.0))


def test_live_run_is_described(tmp_path: Path, pid: int, capsys: pytest.CaptureFixture[str]) -> None:
    write_living(tmp_path, pid)
    assert cli.main(["doctor", "--run", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "dp all_reduce 17 of ranks 0, 1: rank 0 for 40 s; not there: rank 1" in text
    assert re.search(rf"rank 0: pid {pid} on \S+, waiting, 2 steps done\n    in update actor for 30 s", text)
    assert re.search(r"rank 1: .*\n    no sign of life for 1\d\d s", text)
    assert "rank 2: no record" in text
    os.kill(pid, signal.SIGSTOP)
    while state_and_start(pid)[0] != "T":
        time.sleep(0.01)
    assert cli.main(["doctor", "--run", str(tmp_path), "--stacks"]) == 0
    text = capsys.readouterr().out
    assert f"rank 0: pid {pid} on {socket.gethostname()}, stopped, 2 steps done" in text
    assert "Stacks of rank 0" in text
    assert ("nap (<string>:" if find_py_spy() is not None else "no stacks: py-spy is not installed") in text
    stacks = read_stacks(tmp_path, 0)
    assert stacks is not None
    assert (stacks.state, "free of" in stacks.memory) == ("T", True)
    assert stacks.top.startswith("nap (<string>:" if find_py_spy() is not None else "")


def test_end_decides_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_record(tmp_path, record(0, world_size=1, ended=LastWords("done", "", 60, "")))
    assert cli.main(["doctor", "--run", str(tmp_path)]) == 0
    assert capsys.readouterr().out.rstrip().endswith("ended: done, after step 60")
    write_record(tmp_path, record(0, world_size=1, ended=LastWords("error", "disk full", 3, "checkpoint")))
    assert cli.main(["doctor", "--run", str(tmp_path)]) == 1
    assert "disk full" in capsys.readouterr().out
    write_report(tmp_path, observe(tmp_path, world_size=1), "rank 0 is at fault")
    assert cli.main(["doctor", "--run", str(tmp_path)]) == 1
    assert capsys.readouterr().out.endswith("\nrank 0 is at fault\n")


@pytest.mark.parametrize("kind", ["missing", "file", "empty", "link", "hostile"])
def test_folder_of_no_run_is_refused(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    if kind == "file":
        run.write_text("")
    elif kind != "missing":
        run.mkdir()
    if kind == "link":
        health_folder(run).symlink_to("/proc/self")
    if kind == "hostile":
        health_folder(run).mkdir()
        os.mkfifo(health_folder(run) / "rank_00000.json")
        (health_folder(run) / "rank_00001.json").symlink_to("/dev/zero")
        (health_folder(run) / "report_20260101_000000.txt").symlink_to("/dev/zero")
    assert cli.main(["doctor", "--run", str(run)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "holds no records of ranks" in err


def test_stacks_need_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--stacks"]) == 2
    assert "give its folder with --run" in capsys.readouterr().err
