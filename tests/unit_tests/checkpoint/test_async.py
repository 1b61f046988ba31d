"""Saves beside training: what stalls, and what a thread that hangs in the disk costs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mega_rl import disk
from mega_rl.checkpoint import saving as module
from mega_rl.errors import RunError
from mega_rl.parallel.boxes import Piece, whole
from tests.unit_tests.checkpoint.stores import Kept, names, steps, store, values
from tests.unit_tests.checkpoint.watching import instrumented

PATIENCE_S = 20.0


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The disk hangs for other threads from their fourth operation on, until the event is set."""
    here, over, left = threading.current_thread(), threading.Event(), 3

    def hook(name: str, call: Callable[[], Any]) -> Any:
        nonlocal left
        if threading.current_thread() is not here:
            left -= 1
            if left < 0:
                over.wait(PATIENCE_S)
        return call()

    monkeypatch.setattr(module, "STOP_S", 0.2)
    monkeypatch.setattr(disk, "os", instrumented(hook))
    yield over
    over.set()


def test_training_goes_on_beside_a_save(tmp_path: Path) -> None:
    """What was saved is the state at the save; the memory is kept for the next, whose state is larger."""
    root = tmp_path / "run"
    with store(root, actor=1, async_save=True) as saving:
        saving.save(1, {"of": 1})
        saving.run.engines["actor"].matrix.fill_(99.0)  # type: ignore[attr-defined]
        actual: dict[str, float] = {}
        deadline = time.monotonic() + PATIENCE_S
        while "checkpoint/seconds" not in actual:
            assert time.monotonic() < deadline
            actual.update(saving.poll())
        assert set(actual) == {"checkpoint/seconds", "checkpoint/bytes", "checkpoint/stall_s"}
        large = Kept(0)
        large.tensors = {"x": torch.arange(100_000)}
        saving.run.rank_states["large"] = large
        saving.save(2, {"of": 2})
        saving.finish()
    assert steps(root) == [1, 2]
    back = store(root, resume=str(root / "step_000001"))
    assert back.restore().state == {"of": 1}  # type: ignore[union-attr]
    assert values(back) == [1, 0]
    kept = Kept(0)
    store(root, rank_states={"large": kept}).restore()
    assert kept.restored == {"x": list(range(100_000))}


def test_step_is_not_held_up_by_disk(tmp_path: Path, hanging: threading.Event) -> None:
    with store(tmp_path, async_save=True) as saving:
        saving.save(1, {})
        assert saving.poll().keys() == {"checkpoint/stall_s"}
        hanging.set()
        saving.finish()
    assert steps(tmp_path) == [1]


def test_ctrl_c_does_not_wait_for_save(tmp_path: Path, hanging: threading.Event) -> None:
    saving = store(tmp_path / "run", async_save=True)
    saving.save(1, {})
    begin = time.monotonic()
    saving.__exit__(KeyboardInterrupt, None, None)
    assert time.monotonic() - begin < PATIENCE_S / 4
    assert steps(tmp_path / "run") == []


@pytest.mark.parametrize("async_save", [False, True])
def test_late_save_fails_and_next_one_succeeds(
    tmp_path: Path, hanging: threading.Event, monkeypatch: pytest.MonkeyPatch, async_save: bool
) -> None:
    """The thread that hangs publishes nothing when the disk answers again."""
    monkeypatch.setattr("mega_rl.checkpoint.store.BEAT_S", 0.2)
    root = tmp_path / "run"
    with store(root, async_save=async_save, timeout_s=0.5) as saving:
        with pytest.raises(RunError, match=r"rank 0 did not end within checkpoint.timeout_s=0.5"):  # noqa: PT012
            saving.save(1, {})
            saving.finish()
        late = saving._writing._work
        hanging.set()
        assert late is not None
        assert not late.wait(PATIENCE_S)
        assert steps(root) == []
        saving.save(2, {})
        saving.finish()
    assert names(root) == ["step_000002"]


def test_folder_may_go_as_soon_as_the_record_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank publishes then, while the thread of another rank has not returned."""
    work, rename = tmp_path / "work", disk.rename
    work.mkdir()

    def publishing(source: Path, target: Path) -> None:
        rename(source, target)
        work.rename(tmp_path / "published")

    monkeypatch.setattr(disk, "rename", publishing)
    piece = Piece("w", (2,), whole((2,)), torch.ones(2), owned=True)
    job = module.SaveJob(work, "rank_1.safetensors", 10.0)
    assert module.perform(job, [piece], given_up=lambda: False) == []
    assert (tmp_path / "published" / "rank_1.done").exists()
