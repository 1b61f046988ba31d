"""Changes of the disk: durable in the right order, and named when they fail."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from mega_rl import disk
from mega_rl.disk import SaveError


class Recorded:
    """Stands for `os`: notes the calls that change the disk, and makes one of them fail."""

    CHANGES = ("mkdir", "open", "pwritev", "fsync", "rename", "unlink", "rmdir")

    def __init__(self, failing: str = "", code: int = errno.ENOSPC, most: int = 1 << 30) -> None:
        self.calls: list[str] = []
        self._failing, self._code, self._most = failing, code, most

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in self.CHANGES:
            return real

        def call(*args: Any, **keywords: Any) -> Any:
            self.calls.append(name)
            if name == self._failing:
                raise OSError(self._code, os.strerror(self._code))
            if name == "pwritev":
                args = (args[0], [memoryview(b"".join(args[1]))[: self._most]], args[2])
            return real(*args, **keywords)

        return call


def test_a_text_is_replaced_at_once_and_durably(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "latest"
    disk.replace_text(path, "one\n")
    (tmp_path / ".latest.new").write_text("what a kill has left")
    recorded = Recorded()
    monkeypatch.setattr(disk, "os", recorded)
    disk.replace_text(path, "two\n")
    assert recorded.calls == ["unlink", "open", "pwritev", "fsync", "rename", "open", "fsync"]
    assert path.read_text() == "two\n"
    assert [entry.name for entry in tmp_path.iterdir()] == ["latest"]


@pytest.mark.parametrize("most", [1, 3, 1 << 20])
def test_short_writes_are_continued(most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "os", Recorded(most=most))
    fd = disk.open_new(tmp_path / "file")
    buffers = [memoryview(b"ab"), memoryview(b""), memoryview(b"cdef"), memoryview(b"g")]
    disk.write_at(fd, 2, buffers)
    disk.sync(fd)
    disk.close(fd)
    assert (tmp_path / "file").read_bytes() == b"\0\0abcdefg"


@pytest.mark.parametrize(
    ("call", "code"), [("pwritev", errno.ENOSPC), ("fsync", errno.EIO), ("open", errno.EROFS), ("rename", errno.EDQUOT)]
)
def test_failures_name_the_file_and_the_reason(
    call: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "os", Recorded(failing=call, code=code))
    with pytest.raises(SaveError) as caught:
        disk.replace_text(tmp_path / "latest", "text")
    message = str(caught.value)
    assert os.strerror(code) in message
    assert str(tmp_path) in message
    assert "latest" in message


def test_missing_parents_are_made_durably(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded()
    monkeypatch.setattr(disk, "os", recorded)
    disk.make_folder(tmp_path / "a" / "b")
    assert recorded.calls == ["mkdir", "open", "fsync"] * 2
    disk.make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(SaveError, match="file"):
        disk.make_folder(tmp_path / "file" / "c")


def test_a_tree_is_removed_without_following_links(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").touch()
    tree = tmp_path / "tree"
    (tree / "inner").mkdir(parents=True)
    (tree / "inner" / "file").touch()
    (tree / "link").symlink_to(outside)
    (tmp_path / "top").symlink_to(outside)
    disk.remove_tree(tree)
    disk.remove_tree(tmp_path / "top")
    disk.remove_tree(tmp_path / "nothing")
    assert [entry.name for entry in tmp_path.iterdir()] == ["outside"]
    assert (outside / "file").exists()


def test_removed_lock_file_is_taken_anew(tmp_path: Path) -> None:
    first = disk.lock_file(tmp_path / "lock")
    (tmp_path / "lock").unlink()
    second = disk.lock_file(tmp_path / "lock")
    assert os.fstat(second).st_ino == (tmp_path / "lock").stat().st_ino != os.fstat(first).st_ino
    os.close(first)
    os.close(second)


def test_one_holder_at_a_time(tmp_path: Path) -> None:
    first = disk.lock_file(tmp_path / "lock")
    with pytest.raises(BlockingIOError):
        disk.lock_file(tmp_path / "lock")
    os.close(first)
    os.close(disk.lock_file(tmp_path / "lock"))
