"""Which checkpoints count, in what order their folders change, which go, and whose they are."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mega_rl import disk
from mega_rl.checkpoint import folders
from mega_rl.checkpoint.folders import RunLock, complete, torn
from mega_rl.checkpoint.format.reader import Checkpoint
from mega_rl.errors import UserError
from tests.unit_tests.checkpoint.watching import instrumented
from tests.unit_tests.checkpoint.written import manifest_of, save, tensors, write_shards

WAIT_S = 30.0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoints"


def steps(root: Path) -> list[int]:
    return [folders.step_of(folder) for folder in complete(root)]


def keep(root: Path, newest: int, *, keep: int = 2, interval: int = 0, best: str = "") -> list[str]:
    removed = folders.surplus(root, newest_step=newest, keep=keep, keep_interval=interval, keep_best=best)
    folders.remove([path for path, _ in removed])
    return [path.name for path, _ in removed]


def test_a_save_of_the_same_step_replaces_it(root: Path) -> None:
    save(root, 10)
    folder = save(root, 10, metrics={"a": 1.0})
    save(root, 9)
    assert folders.read_manifest(folder).metrics == {"a": 1.0}
    assert (steps(root), torn(root)) == ([9, 10], [])


class Killed(Exception):
    """Stands for SIGKILL: nothing catches it, and nothing may be written after it."""


class Killing:
    """Ends it all before or after the call number `at` that changes the disk.

    A fsync is counted but not done: what a killed process has written is there without it.
    """

    def __init__(self, at: int, *, after: bool) -> None:
        self.count, self.at, self.after = 0, at, after

    def __call__(self, name: str, call: Callable[[], Any]) -> Any:
        self.count += 1
        if self.count > self.at or (self.count == self.at and not self.after):
            raise Killed
        result = None if name == "fsync" else call()
        if self.count == self.at:
            raise Killed
        return result


def save_and_retire(root: Path, step: int) -> None:
    work, whole = folders.begin(root, step), tensors()
    folders.publish(root, manifest_of(step, whole, write_shards(work, whole)))
    keep(root, step, keep=1)


def test_checkpoint_is_flushed_before_it_is_renamed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work, whole = folders.begin(root, 10), tensors()
    manifest = manifest_of(10, whole, write_shards(work, whole))
    done: list[tuple[str, str]] = []

    def recording(name: str) -> Any:
        real = getattr(disk, name)

        def call(path: Path, *rest: Any) -> None:
            done.append((name, path.name))
            real(path, *rest)

        return call

    for name in ("write_text", "sync_folder", "rename"):
        monkeypatch.setattr(disk, name, recording(name))
    folders.publish(root, manifest)
    assert done[:5] == [
        ("write_text", "manifest.json"),
        ("write_text", "COMMIT"),
        ("sync_folder", work.name),
        ("rename", work.name),
        ("sync_folder", root.name),
    ]


@pytest.mark.parametrize("second", [20, 10], ids=["next step", "same step"])
def test_kill_anywhere_leaves_a_whole_checkpoint(
    second: int, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two saves with keep=1, the second is killed at each of its changes; then a run starts over and saves."""
    save(root, 10)
    before = tmp_path / "before"
    shutil.copytree(root, before)
    actual: set[int] = set()
    at, over = 0, False
    monkeypatch.setattr(disk, "os", instrumented(Killing(1 << 30, after=False)))
    while not over:
        at += 1
        for after in (False, True):
            shutil.rmtree(root)
            shutil.copytree(before, root)
            killing = Killing(at, after=after)
            with monkeypatch.context() as patch:
                patch.setattr(disk, "os", instrumented(killing))
                try:
                    save_and_retire(root, second)
                    over = True
                except Killed:
                    pass
            with RunLock(root):
                whole = complete(root)
                assert whole, f"nothing is left after call {killing.count}"
                assert not any(map(folders.size_faults, whole)), f"half of one counts after call {killing.count}"
                checkpoint = Checkpoint.open(whole[-1])
                checkpoint.verify(checkpoint.all_pieces())
                actual.add(folders.step_of(whole[-1]))
                save_and_retire(root, second)
            assert steps(root) == [second]
            left = sorted(path.name for path in root.iterdir())
            assert left == [".lock", "latest", f"step_{second:06d}"], left
    assert at > 30
    assert actual == {10, second}


def test_torn_checkpoints_are_listed_with_reason(root: Path) -> None:
    save(root, 10)
    without, changed, link = (save(root, step) for step in (20, 30, 40))
    (without / "COMMIT").unlink()
    with (changed / "manifest.json").open("ab") as file:
        file.write(b" ")
    link.rename(root / "aside")
    link.symlink_to(root / "aside")
    for name in (".step_000050.tmp", ".step_000060.removed", "notes", ".step_000070.tmp.x", "step_10", "step_0000010"):
        (root / name).mkdir()
    (root / "step_000080").touch()
    actual = {path.name: why for path, why in torn(root)}
    assert steps(root) == [10]
    assert actual.pop("step_000020").startswith("has no COMMIT")
    assert "manifest.json" in actual.pop("step_000030")
    assert "is not a folder" in actual.pop("step_000040")
    assert "is not a folder" in actual.pop("step_000080")
    assert "pending" in actual.pop(".step_000050.tmp")
    assert "removed" in actual.pop(".step_000060.removed")
    assert actual == {}
    assert {path.name for path, _ in folders.damaged(root)} == {f"step_0000{n}" for n in (20, 30, 40, 80)}


def test_multiples_and_the_best_are_kept(root: Path) -> None:
    values = {10: 0.3, 20: 0.9, 30: 0.9, 40: 0.1, 50: 0.2}
    for step, value in values.items():
        save(root, step, metrics={"val/reward_mean": value} if step != 50 else {})
    assert keep(root, 50, keep=1, interval=20, best="val/reward_mean") == ["step_000010"]
    assert steps(root) == [20, 30, 40, 50], "20 and 40 are multiples, 30 is the later one of the best"
    assert keep(root, 50, keep=1, best="val/reward_mean") == ["step_000020", "step_000040"]
    assert keep(root, 50, keep=1, best="no/such") == ["step_000030"]


@pytest.mark.parametrize("damage", ["COMMIT", "shard_00001.safetensors", "shorter"])
def test_damaged_newest_checkpoint_stops_retention(damage: str, root: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(root, 10)
    folder = save(root, 20)
    if damage == "shorter":
        os.truncate(folder / "shard_00001.safetensors", 100)
    else:
        (folder / damage).unlink()
    assert keep(root, 20, keep=1) == []
    assert "no other checkpoint is removed" in caplog.text
    assert (root / "step_000010" / "COMMIT").exists()


def test_the_lock_is_refused_to_a_second_process(root: Path) -> None:
    with RunLock(root) as lock:
        record = json.loads(lock.path.read_text())
        assert (record["host"], record["pid"]) == (socket.gethostname(), os.getpid())
        with pytest.raises(UserError) as caught:
            RunLock(root).take()
        message = str(caught.value)
        assert message.startswith(f"trainer.run_dir={root.parent}: another run (host {socket.gethostname()}, pid ")
        assert f"pid {os.getpid()}, since {record['since']}" in message
        assert "choose another trainer.run_dir" in message
        code = "import sys; from pathlib import Path; from mega_rl.checkpoint.folders import RunLock\n"
        code += "try: RunLock(Path(sys.argv[1])).take()\nexcept ValueError as error: print(error)"
        other = subprocess.run([sys.executable, "-c", code, str(root)], capture_output=True, text=True, check=True)
        assert other.stdout.strip() == message
    with RunLock(root):
        pass


def test_killed_process_frees_lock_despite_fork(root: Path) -> None:
    code = """
import os, sys, time
from pathlib import Path
from mega_rl.checkpoint.folders import RunLock
lock = RunLock(Path(sys.argv[1]))
lock.take()
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code, str(root)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            with pytest.raises(UserError, match=f"pid {process.pid}"):
                RunLock(root).take()
            process.kill()
            process.wait(WAIT_S)
            os.kill(child, 0)
            deadline = time.monotonic() + WAIT_S
            while True:
                try:
                    RunLock(root).take()
                    break
                except UserError:  # the fork may not have run yet
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """The folder of a run of nine steps, and what a save that was cut short has left."""
    run = tmp_path / "run"
    for step in (8, 9):
        save(run / "checkpoints", step)
    (run / "checkpoints" / ".step_000010.tmp").mkdir()
    for name in ("metrics.jsonl", "config.yaml", "rollouts/step_000005.jsonl", "tensorboard/events", "notes.txt"):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text(name)
    return run


def files(folder: Path) -> dict[str, bytes]:
    """Every file by its path, except the newest checkpoint's name."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name != "latest")
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_new_history_moves_old_one_aside(earlier: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing of it is lost, what no run has written stays, and one line says where the rest is."""
    before = files(earlier)
    folders.begin_history(earlier, None)
    aside = earlier / "previous" / "001"
    assert {**files(aside), "notes.txt": b"notes.txt"} == before
    assert (steps(aside / "checkpoints"), steps(earlier / "checkpoints")) == ([8, 9], [])
    assert caplog.messages == [
        f"{earlier} held files of an earlier run (step_000008, step_000009, config.yaml, metrics.jsonl, rollouts, "
        f"tensorboard): moved to {aside}"
    ]
    save(earlier / "checkpoints", 1)
    folders.begin_history(earlier, None)
    assert steps(earlier / "previous" / "002" / "checkpoints") == [1]


def test_going_back_keeps_later_checkpoints(earlier: Path) -> None:
    """Metrics stay: their later lines are of steps that are done again. Going on moves nothing."""
    before, root = files(earlier), earlier / "checkpoints"
    folders.begin_history(earlier, root / "step_000009")
    folders.begin_history(earlier, None, step_in_memory=9)
    assert files(earlier) == before
    folders.begin_history(earlier, root / "step_000008")
    assert (steps(root), steps(earlier / "previous" / "001" / "checkpoints")) == ([8], [9])
    assert (root / "latest").read_text() == "step_000008\n"
    assert (earlier / "metrics.jsonl").exists()


def test_kill_at_any_rename_loses_no_file(earlier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later start that begins another history moves the rest."""
    before, original, real = files(earlier), earlier.with_name("original"), disk.rename
    shutil.copytree(earlier, original)
    for left in range(6):
        shutil.rmtree(earlier)
        shutil.copytree(original, earlier)
        allowed = iter(range(left))

        def rename(source: Path, target: Path, allowed: Any = allowed) -> None:
            if next(allowed, None) is None:
                raise Killed
            real(source, target)

        monkeypatch.setattr(disk, "rename", rename)
        with pytest.raises(Killed):
            folders.begin_history(earlier, None)
        monkeypatch.setattr(disk, "rename", real)
        folders.begin_history(earlier, None)
        moved = {path: data for aside in (earlier / "previous").iterdir() for path, data in files(aside).items()}
        assert {**moved, "notes.txt": b"notes.txt"} == before, left
