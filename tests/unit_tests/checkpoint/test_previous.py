"""A run that begins another history in a folder keeps what is there, whole, whenever it is killed."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from mega_rl import disk
from mega_rl.checkpoint import folders
from mega_rl.checkpoint import maintenance as verbs
from mega_rl.checkpoint.lock import RunLock
from mega_rl.checkpoint.previous import begin_history, previous_runs
from mega_rl.errors import UserError
from tests.unit_tests.checkpoint.stores import store
from tests.unit_tests.checkpoint.written import save


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run of nine steps, and what a save that was cut short has left."""
    run = tmp_path / "run"
    for step in (8, 9):
        save(run / "checkpoints", step)
    (run / "checkpoints" / ".step_000010.tmp").mkdir()
    (run / "checkpoints" / ".lock").touch()
    for name in ("metrics.jsonl", "config.yaml", "rollouts/step_000005.jsonl", "tensorboard/events", "notes.txt"):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text(name)
    return run


def files(folder: Path) -> dict[str, bytes]:
    """Every file but the lock, by its path."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def steps(run: Path) -> list[int]:
    return [folders.step_of(folder) for folder in folders.complete(run / "checkpoints")]


@pytest.mark.parametrize("resume", ["never", "other"])
def test_a_new_history_moves_the_old_one_aside(
    run: Path, tmp_path: Path, resume: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing of it is lost, what no run has written stays, and one line says where the rest is."""
    before = files(run)
    store(tmp_path / "other" / "checkpoints", actor=3).save(3, {})
    checkpoints = store(
        run / "checkpoints", resume=str(tmp_path / "other") if resume == "other" else resume, keep=1, actor=7
    )
    with caplog.at_level(logging.WARNING), checkpoints:
        checkpoints.restore()
        checkpoints.move_earlier_run(run)
        [line] = [record.message for record in caplog.records if "earlier run" in record.message]
        assert line == (
            f"{run} held files of an earlier run (checkpoints of steps 8, 9; config.yaml, metrics.jsonl, "
            f"rollouts, tensorboard): moved to {run}/previous/001"
        )
        with pytest.raises(UserError, match="another run"):
            RunLock(run / "checkpoints").take()
        checkpoints.save(4, {})
    aside = run / "previous" / "001"
    assert {**files(aside), "notes.txt": b"notes.txt"} == before
    assert (steps(aside), steps(run)) == ([8, 9], [4])
    assert not (run / "metrics.jsonl").exists()


def test_going_on_moves_nothing(run: Path) -> None:
    before = files(run)
    begin_history(run, run / "checkpoints" / "step_000009")
    assert files(run) == before


def test_going_back_keeps_the_later_checkpoints(run: Path) -> None:
    """Metrics stay: their later lines are of steps that are done again."""
    begin_history(run, run / "checkpoints" / "step_000008")
    assert (steps(run), steps(run / "previous" / "001")) == ([8], [9])
    assert (run / "metrics.jsonl").exists()
    assert folders.torn(run / "checkpoints") == [
        (run / "checkpoints" / ".step_000010.tmp", "a pending or interrupted save")
    ]


def test_run_without_step_is_not_kept(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("x")
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "checkpoints").mkdir()
    begin_history(tmp_path, None)
    assert previous_runs(tmp_path) == []


class Killed(BaseException):
    """The end of a process."""


def test_kill_at_any_rename_loses_no_file(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later start that begins another history moves the rest, and the newest checkpoint goes last."""
    before, original, real = files(run), run.with_name("original"), disk.rename
    shutil.copytree(run, original)
    for count in range(20):
        shutil.rmtree(run)
        shutil.copytree(original, run)
        left = count

        def rename(source: Path, target: Path) -> None:
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            real(source, target)

        monkeypatch.setattr(disk, "rename", rename)
        try:
            begin_history(run, None)
            break
        except Killed:
            monkeypatch.setattr(disk, "rename", real)
        assert steps(run) == [step for step in (8, 9) if count < {8: 2, 9: 3}[step]], count
        begin_history(run, None)
        moved = {path: data for aside in previous_runs(run) for path, data in files(aside).items()}
        assert {**moved, "notes.txt": b"notes.txt"} == before, count
    assert count > 5
    assert steps(run / "previous" / "001") == [8, 9]


def test_failed_move_names_file_and_fix(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rename(source: Path, target: Path) -> None:
        raise disk.SaveError(f"{target}: cannot be written (Permission denied)")

    monkeypatch.setattr(disk, "rename", rename)
    with pytest.raises(UserError, match=r"cannot be moved to .*previous/001 \(.*Permission denied\)\); choose another"):
        begin_history(run, None)
    assert steps(run) == [8, 9]


def test_list_names_earlier_runs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begin_history(run, None)
    aside = run / "previous" / "001"
    assert verbs.list_checkpoints(run) == 0
    assert f"an earlier run is in {aside}: checkpoints of steps 8, 9" in capsys.readouterr().out
    verbs.list_checkpoints(run, as_json=True)
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert report["previous"] == [str(aside)]
    verbs.list_checkpoints(aside, as_json=True)
    assert [row["step"] for row in json.loads(capsys.readouterr().out)["checkpoints"]] == [8, 9]


def test_retention_and_prune_leave_earlier_runs_alone(run: Path) -> None:
    begin_history(run, None)
    for step in (1, 2, 3):
        store(run / "checkpoints", keep=1).save(step, {})
    verbs.prune(run, keep=1)
    assert (steps(run), steps(run / "previous" / "001")) == ([3], [8, 9])
