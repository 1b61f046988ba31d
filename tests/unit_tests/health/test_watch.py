"""Runs that stand still without an end, seen from outside; and kinds of ends."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch.distributed as dist

from mega_rl.errors import HungError, RunError, StalledError, UserError
from mega_rl.health import flight_recorder
from mega_rl.health.endings import kind_of
from mega_rl.health.records import LastWords, PhaseRecord, write_record
from mega_rl.health.watch import RunWatch
from tests.unit_tests.health.examples import NOW, call, record

LATE = call("dp", 3, 0, 1, age_s=700.0)


def test_a_run_at_work_is_not_overdue(tmp_path: Path) -> None:
    assert RunWatch(tmp_path).overdue() is None
    write_record(tmp_path, record(0, waiting=call("dp", 3, 0, 1, age_s=603.0)))
    write_record(tmp_path, record(1, beat=NOW - 5000.0))  # silent, but rank 0 is not
    assert RunWatch(tmp_path).overdue() is None


def test_a_wait_past_its_deadline_is_overdue_until_a_rank_has_ended(tmp_path: Path) -> None:
    write_record(tmp_path, record(0, waiting=LATE))
    assert RunWatch(tmp_path).overdue() == "rank 0 waits in dp all_reduce 3 for 700 s, longer than it may"
    write_record(tmp_path, record(1, ended=LastWords("done", "", 3, "")))
    assert RunWatch(tmp_path).overdue() is None


def test_a_phase_far_past_its_deadline_is_overdue(tmp_path: Path) -> None:
    write_record(tmp_path, record(0, phases=(PhaseRecord("starting servers", 300.0, 100.0),)))
    assert RunWatch(tmp_path).overdue() == "rank 0 is in 'starting servers' for 300 s, longer than it may"


def test_silence_of_all_ranks_is_overdue(tmp_path: Path) -> None:
    now = [50.0]
    watch = RunWatch(tmp_path, clock=lambda: now[0])
    for rank in range(2):
        write_record(tmp_path, record(rank))
    assert watch.overdue() is None
    now[0] += 700.0
    assert watch.overdue() == "no sign of life of ranks 0 and 1 for 700 s"
    write_record(tmp_path, record(1, beat=NOW - 3600.0))  # its clock was set back, and it lives
    assert watch.overdue() is None


def test_a_wall_clock_that_jumps_is_no_silence(tmp_path: Path) -> None:
    watch = RunWatch(tmp_path)
    write_record(tmp_path, record(beat=time.time() - 86_400.0))
    assert watch.overdue() is None


def test_a_collectives_age_does_not_jump_with_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch writes down when it was called by the wall clock."""
    began_ns, wall_s, steady_s = 10**18, [0.0], [0.0]
    entry = {
        "process_group": ("0", "default_pg"), "profiling_name": "gloo:all_reduce", "is_p2p": False, "p2p_seq_id": 0,
        "collective_seq_id": 7, "time_created_ns": began_ns, "timeout_ms": 8000, "state": "started", "retired": False,
    }  # fmt: skip
    monkeypatch.setattr(flight_recorder, "_entries", lambda: [entry])
    monkeypatch.setattr(flight_recorder, "_members", lambda name: (0, 1))
    monkeypatch.setattr(flight_recorder.time, "time_ns", lambda: began_ns + int(wall_s[0] * 1e9))
    monkeypatch.setattr(flight_recorder.time, "monotonic", lambda: steady_s[0])
    recorder = flight_recorder.FlightRecorder()

    def age() -> float:
        waiting, _ = recorder.collectives()
        assert waiting is not None
        return waiting.age_s

    steady_s[0], wall_s[0] = 5.0, 2.0
    assert age() == 2.0
    steady_s[0], wall_s[0] = 6.0, 2.0 + 86_400.0
    assert age() == 3.0
    recorder = flight_recorder.FlightRecorder()  # the clock had jumped before its first look
    steady_s[0] = 6.5
    assert age() == 0.5


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("[/gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer"), "lost peer"),
        (RuntimeError("[/gloo/unbound_buffer.cc:78] Timed out waiting 8000ms for recv operation"), "timeout"),
        (RuntimeError("Application timeout caused pair closure"), "lost peer"),
        (RuntimeError("my code: Application timeout caused pair closure"), "error"),
        (dist.DistBackendError("[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)"), "timeout"),
        (dist.DistBackendError("NCCL error: remote process exited or there was a network error"), "lost peer"),
        (dist.DistStoreError("wait timeout after 8000ms, keys: /a"), "timeout"),
        (dist.DistNetworkError("failed to recv, got 0 bytes"), "lost peer"),
        (StalledError("rank 1 has scored no response"), "timeout"),
        (HungError("rank 1 has scored no response"), "hung"),
        (RunError("reward: timed out after 3 s"), "error"),
        (RuntimeError("my service: Timed out waiting"), "error"),
        (UserError("data: no such file"), "error"),
        (ValueError("gloo: Connection reset by peer"), "error"),
        (KeyboardInterrupt(), "stopped"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_kinds_of_ends(error: BaseException, kind: str) -> None:
    assert kind_of(error) == kind
