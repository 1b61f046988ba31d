"""The lock of storage; those of a run's checkpoints and of output folders are tested with these."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mega_rl.storage.disk import lock_file


def test_one_holder_at_a_time(tmp_path: Path) -> None:
    first = lock_file(tmp_path / "lock")
    with pytest.raises(BlockingIOError):
        lock_file(tmp_path / "lock")
    os.close(first)
    os.close(lock_file(tmp_path / "lock"))


def test_a_file_that_its_holder_removed_is_not_the_lock(tmp_path: Path) -> None:
    first = lock_file(tmp_path / "lock")
    (tmp_path / "lock").unlink()
    second = lock_file(tmp_path / "lock")
    assert os.fstat(second).st_ino == (tmp_path / "lock").stat().st_ino != os.fstat(first).st_ino
    os.close(first)
    os.close(second)


def test_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        lock_file(tmp_path / "lock")
    assert not (tmp_path / "elsewhere").exists()
