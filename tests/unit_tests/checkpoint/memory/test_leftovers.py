"""`mega-rl checkpoint memory`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mega_rl.checkpoint.lock import RunLock
from mega_rl.checkpoint.maintenance import list_memory
from mega_rl.checkpoint.memory import place
from mega_rl.errors import UserError


def left(shm: Path, run_dir: Path, *, token: str = "0123456789abcdef") -> Path:
    """A folder in memory of a run, with 8 KiB in it."""
    folder = place.folder_of(shm, os.path.realpath(run_dir), token)
    place.make(folder, os.path.realpath(run_dir))
    (folder / "shard").write_bytes(bytes(8192))
    return folder


def rows(capsys: pytest.CaptureFixture[str], *args: Any, **options: Any) -> list[dict[str, Any]]:
    assert list_memory(*args, as_json=True, **options) == 0
    answer: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["memory"]
    return answer


def test_lists_all_or_those_of_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = left(tmp_path, tmp_path / "one"), left(tmp_path, tmp_path / "two")
    assert {row["path"] for row in rows(capsys, None, shm=tmp_path)} == {str(one), str(two)}
    [row] = rows(capsys, tmp_path / "one", shm=tmp_path)
    assert (row["path"], row["run"], row["steps"], row["state"]) == (str(one), str(tmp_path / "one"), [], "left")
    assert row["bytes"] >= 8192
    list_memory(None, shm=tmp_path)
    assert f"{one}: of {tmp_path / 'one'}: steps none, " in capsys.readouterr().out


def test_removes_what_no_run_uses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = left(tmp_path, tmp_path / "one"), left(tmp_path, tmp_path / "two")
    with RunLock(tmp_path / "two" / "checkpoints"):
        states = {row["path"]: row["state"] for row in rows(capsys, None, remove=True, shm=tmp_path)}
    assert states == {str(one): "removed", str(two): "in use"}
    assert (one.exists(), two.exists()) == (False, True)
    assert list_memory(tmp_path / "two", remove=True, shm=tmp_path) == 0
    assert list(tmp_path.glob("mega_rl-*")) == []
    assert list_memory(None, shm=tmp_path) == 0
    assert "no checkpoints in memory" in capsys.readouterr().out


def test_files_removed_meanwhile_count_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each save removes the checkpoint before."""
    folder = left(tmp_path, tmp_path / "one")
    (folder / "removed").write_bytes(bytes(8192))

    def without(ask: Callable[..., os.stat_result]) -> Callable[..., os.stat_result]:
        def answer(path: Any, *args: Any, **options: Any) -> os.stat_result:
            if os.fspath(path) == str(folder / "removed"):
                raise FileNotFoundError(2, "No such file or directory")
            return ask(path, *args, **options)

        return answer

    monkeypatch.setattr(os, "stat", without(os.stat))
    monkeypatch.setattr(os, "lstat", without(os.lstat))
    [row] = rows(capsys, None, shm=tmp_path)
    assert 8192 <= row["bytes"] < 16384


def test_does_not_look_into_anothers_folder(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    place.user_folder(tmp_path).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="is a link; it is not read"):
        list_memory(None, shm=tmp_path)
