"""What a launcher reads from a run's folder: overdue ranks, progress, and a file system that hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mega_rl.cli.launch import newest_checkpoints
from mega_rl.operations.launcher import run_health
from mega_rl.operations.launcher.run_health import RunHealth, RunProgress
from mega_rl.tracking.health.records import LastWords, PhaseRecord, read_records, write_record
from tests.unit_tests.operations.diagnosis.examples import NOW, call, record
from tests.unit_tests.operations.launcher.programs import save_in


@pytest.fixture
def hangs(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Let reading and removing records hang while the event is set."""
    set_, continues = threading.Event(), threading.Event()

    def hanging(*arguments: Path) -> object:
        if set_.is_set():
            continues.wait(60)
        return read_records(*arguments)

    for name in ("read_records", "clear"):
        monkeypatch.setattr(run_health, name, hanging)
    for name in ("LOOK_S", "ANSWER_S"):
        monkeypatch.setattr(run_health, name, 0.05)
    yield set_
    continues.set()


@pytest.mark.parametrize(
    ("records", "reason"),
    [
        ([], None),
        ([record(0, waiting=call("dp", 3, 0, 1, age_s=603.0)), record(1, beat=NOW - 5000.0)], None),
        ([record(0, waiting=call("dp", 3, 0, 1, age_s=700.0))],
         "rank 0 waits in dp all_reduce 3 for 700 s, longer than it may"),
        ([record(0, waiting=call("dp", 3, 0, 1, age_s=700.0)), record(1, ended=LastWords("done", "", 3, ""))], None),
        ([record(0, phases=(PhaseRecord("starting servers", 300.0, 100.0),))],
         "rank 0 is in 'starting servers' for 300 s, longer than it may"),
        ([record(beat=time.time() - 86_400.0)], None),  # the wall clock has jumped
    ],
    ids=["no records", "at work", "past its deadline", "a rank has ended", "long phase", "wall clock"],
)  # fmt: skip
def test_only_waits_past_their_deadline_are_overdue(tmp_path: Path, records: list, reason: str | None) -> None:
    for one in records:
        write_record(tmp_path, one)
    assert RunHealth(tmp_path).overdue() == reason


def test_silence_of_all_ranks_is_overdue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [50.0]
    monkeypatch.setattr(run_health, "monotonic", lambda: now[0])
    health = RunHealth(tmp_path)
    for rank in range(2):
        write_record(tmp_path, record(rank))
    assert health.overdue() is None
    now[0] += 700.0
    assert health.overdue() == "no sign of life of ranks 0 and 1 for 700 s"
    write_record(tmp_path, record(1, beat=NOW - 3600.0))  # its clock was set back, and it lives
    assert health.overdue() is None


def test_folder_that_hangs_makes_the_run_overdue(
    tmp_path: Path, hangs: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_record(tmp_path, record(timeout_s=10.0))
    now = [0.0]
    monkeypatch.setattr(run_health, "monotonic", lambda: now[0])
    health = RunHealth(tmp_path)
    assert health.overdue() is None
    hangs.set()
    for seconds in (0.0, 69.0):  # within what a collective may take, and a minute
        now[0] = seconds
        assert health.overdue() is None
    now[0] = 71.0
    assert health.overdue() == f"the run folder {tmp_path} has not answered for 71 s: its file system hangs"


def test_launcher_continues_without_records(
    tmp_path: Path, hangs: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    write_record(tmp_path, record(step=3))
    health = RunHealth(tmp_path)
    assert health.step() == 3
    hangs.set()
    assert health.step() is None
    health.clear()
    assert caplog.text.count("takes longer than 0.05 s: does the file system hang?") == 2


def progress_of(run_dir: Path, *, resume: str = "auto", recorded: int | None = None) -> RunProgress:
    """Return the progress of a run whose ranks have recorded a step, if any."""

    class Health(RunHealth):
        def step(self) -> int | None:
            return recorded

    newest = lambda run_dir: newest_checkpoints(run_dir, shm=run_dir / "shm")  # noqa: E731
    return RunProgress(run_dir, Health(run_dir), newest, resume=resume)


def test_only_checkpoints_of_this_launch_are_progress(tmp_path: Path) -> None:
    save_in(tmp_path / "checkpoints", 3)
    progress = progress_of(tmp_path)
    assert (progress.step, progress.is_saved, progress.is_made) == (3, False, False)
    save_in(tmp_path / "checkpoints", 4)
    assert (progress.step, progress.is_saved, progress.is_made) == (4, True, True)


@pytest.mark.parametrize(
    ("resume", "recorded", "made"),
    [
        ("auto", 3, False),
        ("auto", 4, True),
        ("never", 0, False),
        ("never", 1, True),
        ("elsewhere/step_000007", 8, True),
    ],
)
def test_recorded_steps_are_progress(tmp_path: Path, resume: str, recorded: int, made: bool) -> None:
    save_in(tmp_path / "checkpoints", 3)
    progress = progress_of(tmp_path, resume=resume, recorded=recorded)
    assert (progress.step, progress.is_made) == (recorded, made)


@pytest.mark.parametrize(
    ("resume", "on_disk", "words"),
    [
        ("auto", None, "the beginning"),
        ("auto", 4, "the checkpoint of step 4 on disk"),
        ("never", None, "the beginning"),
        ("elsewhere/step_000007", None, "checkpoint.resume=elsewhere/step_000007"),
        ("elsewhere/step_000007", 8, "the checkpoint of step 8 on disk"),
    ],
)
def test_next_start_is_named_with_its_place(tmp_path: Path, resume: str, on_disk: int | None, words: str) -> None:
    progress = progress_of(tmp_path, resume=resume)
    if on_disk is not None:
        save_in(tmp_path / "checkpoints", on_disk)
    assert progress.next_start == words
    assert progress.is_saved == (on_disk is not None)
