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
from mega_rl.operations.diagnosis.observations import observe
from mega_rl.operations.diagnosis.report import newest_report, write_report
from mega_rl.operations.diagnosis.stacks import collect, find_py_spy, read_stacks
from mega_rl.tracking.health.process_state import GONE, ProcessState, process_state, start_time
from mega_rl.tracking.health.records import LastWords, health_folder, write_record
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
    here = {"pid": pid, "started": start_time(pid), "host": socket.gethostname(), "beat": time.time()}
    write_record(run, record(0, world_size=3, waiting=call("dp", 17, 0, 1), **here))
    write_record(run, record(1, world_size=3, beat=time.time() - 100.0))


def test_live_run_is_shown_as_a_table(tmp_path: Path, pid: int, capsys: pytest.CaptureFixture[str]) -> None:
    write_living(tmp_path, pid)
    assert cli.main(["doctor", "--run", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.match(r"rank +process +step +phase +waits in +at", lines[0])
    assert re.match(rf"0 +{pid} \S+ +2 +update actor 30 s +dp all_reduce 17 40 s +forward /lib/layers.py:12", lines[1])
    assert re.search(r"SILENT for 1\d\d s, last seen in update actor", lines[2])
    assert lines[3] == "1 of 3 ranks have no record"
    os.kill(pid, signal.SIGSTOP)
    while not process_state(pid).stopped:
        time.sleep(0.01)
    assert cli.main(["doctor", "--run", str(tmp_path), "--stacks"]) == 0
    out = capsys.readouterr().out
    assert "STOPPED, last seen in update actor" in out
    assert "Stacks of rank 0" in out
    assert ("nap (<string>:" if find_py_spy() is not None else "no stacks: py-spy is not installed") in out


def test_stacks_of_a_stopped_process_are_kept(tmp_path: Path, pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    while not process_state(pid).stopped:
        time.sleep(0.01)
    collect(tmp_path, {4: pid})
    stacks = read_stacks(tmp_path, 4)
    assert stacks is not None
    assert stacks.state.state == "T"
    assert "free of" in stacks.memory
    assert stacks.top.startswith("nap (<string>:" if find_py_spy() is not None else "")


def test_process_without_a_record_gets_no_signal(tmp_path: Path, pid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal that asks a rank for its stacks would end another program."""
    monkeypatch.setattr("mega_rl.operations.diagnosis.stacks.find_py_spy", lambda: None)
    write_living(tmp_path, pid)
    collect(tmp_path, {0: pid, 1: pid})
    time.sleep(0.2)
    assert process_state(pid).alive


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


@pytest.mark.parametrize("kind", ["done", "error"])
def test_last_words_after_the_record_count(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank ends well after its record has been read, and before the kernel is asked for its process."""
    living = {"pid": os.getpid(), "host": socket.gethostname(), "started": 0, "beat": time.time()}
    write_record(tmp_path, record(0, world_size=1, **living))

    def end(pid: int, started: int = 0) -> ProcessState:
        write_record(tmp_path, record(0, world_size=1, ended=LastWords(kind, "", 8, ""), **living))
        return GONE

    for module in ("observations", "overview"):
        monkeypatch.setattr(f"mega_rl.operations.diagnosis.{module}.process_state", end)
    ended = observe(tmp_path, world_size=1).records[0].ended
    assert ended is not None
    assert ended.kind == kind
    write_record(tmp_path, record(0, world_size=1, **living))
    assert cli.main(["doctor", "--run", str(tmp_path)]) == int(kind == "error")


def test_newest_report_is_the_last_of_a_second(tmp_path: Path) -> None:
    seen = observe(tmp_path, world_size=1)
    for number in range(12):
        write_report(tmp_path, seen, f"cause {number}")
    report = newest_report(tmp_path)
    assert report is not None
    assert report[1].endswith("cause 11\n")


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
