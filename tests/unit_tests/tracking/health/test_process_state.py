"""Memory that control groups leave to this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from mega_rl.checkpoint.memory.place import free_memory
from mega_rl.tracking.health import process_state


@pytest.mark.parametrize(
    ("container", "pod", "free"),
    [
        (("5000", 3000, 900, 400), ("max", 1, 0, 0), 2500),  # file cache is freed, a tmpfs, which counts in it, is not
        (("5000", 1000, 0, 0), ("6000", 5500, 0, 0), 500),
        (("5000", 6000, 0, 0), ("max", 1, 0, 0), 0),
    ],
    ids=["file cache", "nested", "full"],
)
def test_container_limit_is_least_free_memory(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    container: tuple[str, int, int, int],
    pod: tuple[str, int, int, int],
    free: int,
) -> None:
    for folder, (limit, current, file, shmem) in ((tmp_path / "g/pod", pod), (tmp_path / "g/pod/container", container)):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{current}\n")
        (folder / "memory.stat").write_text(f"anon 1\nfile {file}\nshmem {shmem}\n")
    monkeypatch.setattr(process_state, "_cgroup_folder", lambda: tmp_path / "g" / "pod" / "container")
    assert free_memory(tmp_path) == (free, "the container's memory limit")
