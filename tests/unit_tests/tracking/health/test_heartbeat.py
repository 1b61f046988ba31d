"""Heartbeat of a rank: its last words, also on a file system that hangs."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import pytest

from mega_rl.errors import RunError
from mega_rl.tracking.health import heartbeat
from mega_rl.tracking.health.guard import guarded
from mega_rl.tracking.health.heartbeat import Heartbeat, RankFacts
from mega_rl.tracking.health.records import RankRecord, read_records


def heartbeat_in(folder: Path, *, launched: bool = False) -> Heartbeat:
    facts = RankFacts(folder, rank=0, world_size=1, generation=0, timeout_s=60.0, launched=launched)
    return Heartbeat(facts, lambda: (None, None, ()))


def test_last_words_are_on_disk_when_they_are_said(tmp_path: Path) -> None:
    with heartbeat_in(tmp_path) as beat:
        beat.end("error", "no room")
        words = read_records(tmp_path)[0].ended
    assert words is not None
    assert (words.kind, words.message) == ("error", "no room")
    assert read_records(tmp_path)[0].ended == words, "the first ones stay"


def test_rank_without_its_launcher_ends_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It got SIGTERM from the kernel, but waits in a collective."""
    signals: list[int] = []
    beat = heartbeat_in(tmp_path, launched=True)
    monkeypatch.setattr(heartbeat, "SAVE_S", 0.2)
    monkeypatch.setattr(heartbeat.os, "kill", lambda _, number: signals.append(number))
    beat._end_orphan()
    monkeypatch.setattr(heartbeat.os, "getppid", lambda: 1)
    beat._end_orphan()
    assert not signals
    time.sleep(0.3)
    beat._end_orphan()
    assert signals == [signal.SIGKILL]


def test_system_exit_inside_a_run_is_a_failure(tmp_path: Path) -> None:
    with (
        pytest.raises(
            RunError, match=r"^SystemExit\(0\) was raised inside of the run \(at .*test_heartbeat.py:\d+ in test_"
        ),
        heartbeat_in(tmp_path) as beat,
        guarded(beat),
    ):
        raise SystemExit(0)
    words = read_records(tmp_path)[0].ended
    assert words is not None
    assert words.kind == "error"


def test_hanging_file_system_does_not_hold_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hangs, goes_on = threading.Event(), threading.Event()
    written: list[RankRecord] = []

    def write(run_dir: Path, record: RankRecord) -> None:
        if hangs.is_set():
            goes_on.wait(60)
        written.append(record)

    monkeypatch.setattr(heartbeat, "write_record", write)
    monkeypatch.setattr(heartbeat, "WRITE_S", 0.1)
    with heartbeat_in(tmp_path) as beat:
        hangs.set()
        assert beat.end("error", "no room").message == "no room"
        assert [record.ended for record in written] == [None]
        assert "the last words of rank 0 are not written after 0.1 s: does the file system of" in caplog.text
    goes_on.set()
