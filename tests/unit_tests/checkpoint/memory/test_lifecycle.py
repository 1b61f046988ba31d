"""From the first save in memory to the end of the run, on one rank: what is kept, refused, ignored and removed."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from mega_rl.checkpoint.memory import store as writing
from mega_rl.checkpoint.memory.hosts import Host
from mega_rl.checkpoint.memory.place import user_folder
from mega_rl.checkpoint.memory.store import MemoryCheckpoints
from mega_rl.checkpoint.store import RunCheckpoints
from mega_rl.errors import RunError
from tests.unit_tests.checkpoint.memory.stores_on_ranks import flip
from tests.unit_tests.checkpoint.stores import store, values


@pytest.fixture
def shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tmpfs of the one host."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(MemoryCheckpoints, "host", staticmethod(lambda: Host("key", "host0", folder)))
    return folder


def run(tmp_path: Path, value: float, **changes: Any) -> RunCheckpoints:
    """A store of the run in tmp_path, with checkpoints in memory."""
    return store(tmp_path / "run" / "checkpoints", actor=value, critic=value, **({"memory_interval": 1} | changes))


def start(saving: RunCheckpoints, tmp_path: Path) -> tuple[int, str]:
    """Lock, restore and begin, as a run does; (step, where it was saved)."""
    saving.lock()
    manifest = saving.restore()
    saving.move_earlier_run(tmp_path / "run")
    return (0, "") if manifest is None else (manifest.step, manifest.state["of"])


def crash(saving: RunCheckpoints) -> None:
    """End as an error does."""
    saving.__exit__(RuntimeError, RuntimeError("x"), None)


def killed_run(tmp_path: Path, *, on_disk: int = 1, in_memory: int = 3, **changes: Any) -> None:
    """A run that saves value n after step n, and crashes."""
    saving = run(tmp_path, 0, **changes)
    start(saving, tmp_path)
    for step in range(1, in_memory + 1):
        for engine in saving.run.engines.values():
            set_value(engine, step)
        if step == on_disk:
            saving.save(step, {"of": "disk"})
        saving.save_in_memory(step, {"of": "memory"})
    crash(saving)


def set_value(engine: Any, value: float) -> None:
    for tensor in (engine.matrix, engine.vector, engine.scalar):
        tensor.fill_(value)
    engine.steps = int(value)


def held(shm: Path) -> list[str]:
    """The checkpoints in memory."""
    return sorted(path.name for path in shm.glob("mega_rl-*/*/step_*"))


def test_a_crashed_run_goes_on_from_memory(tmp_path: Path, shm: Path) -> None:
    killed_run(tmp_path)
    assert held(shm) == ["step_000003"]
    second = run(tmp_path, 9)
    assert start(second, tmp_path) == (3, "memory")
    assert values(second) == [3.0, 3.0]
    assert (tmp_path / "run" / "checkpoints" / "step_000001").is_dir()
    assert not (tmp_path / "run" / "previous").exists()
    crash(second)
    third = run(tmp_path, 9)
    assert start(third, tmp_path) == (3, "memory"), "it is lost before the next one is there"
    third.close()


def test_the_end_of_a_run_frees_the_memory(tmp_path: Path, shm: Path) -> None:
    killed_run(tmp_path)
    with run(tmp_path, 9) as second:
        second.restore()
        second.move_earlier_run(tmp_path / "run")
        second.save_in_memory(4, {})
        assert held(shm) == ["step_000004"]
        second.save(4, {})
    assert list(shm.iterdir()) == []


def test_a_failed_last_save_keeps_the_memory(
    tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from mega_rl.checkpoint import store as module

    def save_on_a_full_disk() -> None:
        with run(tmp_path, 2, on_error="continue") as saving:
            saving.move_earlier_run(tmp_path / "run")
            saving.save_in_memory(2, {"of": "memory"})
            monkeypatch.setattr(module.disk, "free_bytes", lambda path: 0 if path.name == "checkpoints" else 1 << 40)
            saving.save(2, {"of": "disk"})

    with pytest.raises(RunError, match="it was the run's last one"):
        save_on_a_full_disk()
    assert held(shm) == ["step_000002"]
    assert "the checkpoint of step 2 stays in memory" in caplog.text
    second = run(tmp_path, 9)
    assert start(second, tmp_path) == (2, "memory")
    second.close()


@pytest.mark.parametrize("resume", ["never", "{run}/checkpoints/step_000001"])
def test_another_history_removes_what_memory_has(tmp_path: Path, shm: Path, resume: str) -> None:
    killed_run(tmp_path)
    second = run(tmp_path, 9, resume=resume.format(run=tmp_path / "run"))
    start(second, tmp_path)
    assert held(shm) == []
    second.close()


def test_a_damaged_one_falls_back_to_disk(tmp_path: Path, shm: Path, caplog: pytest.LogCaptureFixture) -> None:
    killed_run(tmp_path)
    [shard] = shm.glob("mega_rl-*/*/step_000003/shard_*")
    flip(shard)
    second = run(tmp_path, 9)
    assert start(second, tmp_path) == (1, "disk")
    assert values(second) == [1.0, 1.0]
    ignored = [record.getMessage() for record in caplog.records if record.getMessage().startswith("ignored")]
    assert len(ignored) == 1
    assert ignored[0].startswith(f"ignored: {shard}: ")
    second.close()


def refuse(shm: Path, kind: str) -> None:
    """Make the user's folder one that is not this user's alone."""
    folder = user_folder(shm)
    if kind == "link":
        (shm / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(shm / "elsewhere")
        return
    folder.mkdir(mode=0o700)
    if kind == "owner":
        os.chown(folder, 12345, -1)
    else:
        folder.chmod(0o755)


@pytest.mark.parametrize(
    "kind",
    ["link", "mode", pytest.param("owner", marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root gives away"))],
)
@pytest.mark.parametrize("on_error", ["continue", "stop"])
def test_anothers_folder_is_refused(
    tmp_path: Path, shm: Path, caplog: pytest.LogCaptureFixture, kind: str, on_error: str
) -> None:
    """One line; nothing is written into it."""
    why = "is not a folder that only this user may enter"
    refuse(shm, kind)
    saving = run(tmp_path, 1, on_error=on_error)
    if on_error == "stop":
        with pytest.raises(RunError) as raised:
            start(saving, tmp_path)
        assert why in str(raised.value)
    else:
        start(saving, tmp_path)
        saving.save_in_memory(1, {})
        [error] = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
        assert f"{user_folder(shm)}: {why}; set checkpoint.memory.interval=0" in error
    assert [*user_folder(shm).iterdir(), *shm.glob("elsewhere/*")] == []
    saving.close()


@pytest.mark.parametrize("on_error", ["continue", "stop"])
def test_too_little_memory(
    tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, on_error: str
) -> None:
    """One line that says how much of what; the run goes on without, and frees what it has."""
    monkeypatch.setattr(writing, "free_memory", lambda folder: (3000, "the host"))
    saving = run(tmp_path, 1, on_error=on_error)
    start(saving, tmp_path)
    text = r"the checkpoint of step 1 in memory failed: host0: 2.20 MB are needed and 3.00 KB are free in the host"
    if on_error == "stop":
        with pytest.raises(RunError, match=text):
            saving.save_in_memory(1, {})
    else:
        saving.save_in_memory(1, {})
        saving.save_in_memory(2, {})
        [error] = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
        assert error.startswith(text)
        assert error.endswith("training continues without them")
        assert list(shm.iterdir()) == []
    assert saving.poll() == {}
    saving.close()
