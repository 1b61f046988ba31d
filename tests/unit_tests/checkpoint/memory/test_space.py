"""Memory that may still be written: the least of tmpfs, host and container."""

from __future__ import annotations

from pathlib import Path

import pytest

from mega_rl.checkpoint.memory.place import free_memory


@pytest.mark.parametrize(
    ("container", "pod", "free"),
    [
        (("5000", 3000, 900, 400), ("max", 1, 0, 0), 2500),  # file cache is freed, a tmpfs, which counts in it, is not
        (("5000", 1000, 0, 0), ("6000", 5500, 0, 0), 500),
        (("5000", 6000, 0, 0), ("max", 1, 0, 0), 0),
        (("max", 10, 0, 0), ("max", 10, 0, 0), None),
    ],
    ids=["file cache", "nested", "full", "no limit"],
)
def test_container_limit_is_least_free_memory(
    tmp_path: Path, container: tuple[object, ...], pod: tuple[object, ...], free: int | None
) -> None:
    for folder, (limit, current, file, shmem) in ((tmp_path / "pod", pod), (tmp_path / "pod/container", container)):
        folder.mkdir()
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{current}\n")
        (folder / "memory.stat").write_text(f"anon 1\nfile {file}\nshmem {shmem}\n")
    (tmp_path / "own").write_text("0::/pod/container\n")
    actual = free_memory(tmp_path, cgroups=tmp_path, own=tmp_path / "own")
    assert actual == (free, "the container's memory limit") if free is not None else actual[0] > 1 << 20
