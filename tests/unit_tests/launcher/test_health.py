"""Records of ranks on a file system that hangs: the launcher goes on, and says so in time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mega_rl.health import watch
from mega_rl.health.records import read_records, write_record
from mega_rl.launcher import health
from mega_rl.launcher.beside import within
from mega_rl.launcher.health import RunRecords
from tests.unit_tests.health.examples import record


@pytest.fixture
def hangs(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Let reading and removing records hang while the event is set."""
    set_, goes_on = threading.Event(), threading.Event()

    def hanging(*arguments: Path) -> object:
        if set_.is_set():
            goes_on.wait(60)
        return read_records(*arguments)

    monkeypatch.setattr(watch, "read_records", hanging)
    monkeypatch.setattr(health, "read_records", hanging)
    monkeypatch.setattr(health, "clear", hanging)
    monkeypatch.setattr(health, "LOOK_S", 0.05)
    monkeypatch.setattr(health, "ANSWER_S", 0.05)
    yield set_
    goes_on.set()


def test_a_folder_that_hangs_makes_the_run_overdue(tmp_path: Path, hangs: threading.Event) -> None:
    write_record(tmp_path, record(timeout_s=10.0))
    now = [0.0]
    records = RunRecords(tmp_path, clock=lambda: now[0])
    assert records.overdue() is None
    hangs.set()
    assert records.overdue() is None
    now[0] = 69.0
    assert records.overdue() is None, "within what a collective may take, and a minute"
    now[0] = 71.0
    assert records.overdue() == f"the run folder {tmp_path} has not answered for 71 s: its file system hangs"


def test_a_folder_that_answers_again_is_forgiven(tmp_path: Path, hangs: threading.Event) -> None:
    write_record(tmp_path, record(timeout_s=10.0))
    now = [0.0]
    records = RunRecords(tmp_path, clock=lambda: now[0])
    records.overdue()
    now[0] = 1000.0
    assert records.overdue() == "no sign of life of rank 0 for 1000 s"
    write_record(tmp_path, record(timeout_s=10.0, beat=5.0))
    assert records.overdue() is None


def test_a_launcher_goes_on_without_records(
    tmp_path: Path, hangs: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    write_record(tmp_path, record(step=3))
    records = RunRecords(tmp_path)
    assert records.step() == 3
    hangs.set()
    assert records.step() is None
    records.clear()
    assert caplog.text.count("access to") == 2
    assert "takes longer than 0.05 s: does the file system hang?" in caplog.text


def test_errors_of_a_call_are_its_callers() -> None:
    def fails() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        within(60.0, fails, otherwise=None, name="a call")
