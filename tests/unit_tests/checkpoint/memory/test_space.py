"""Memory that may still be written: the least of tmpfs, host and container."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from mega_rl.checkpoint.memory.place import free_memory


def control_group(folder: Path, limit: str, current: int, file: int, shmem: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{current}\n")
    (folder / "memory.stat").write_text(f"anon 1\nfile {file}\nshmem {shmem}\n")


@pytest.fixture
def groups(tmp_path: Path) -> tuple[Path, Path]:
    """Folder of control groups, and the file that names this process's."""
    own = tmp_path / "cgroup"
    own.write_text("0::/pod/container\n")
    return tmp_path / "groups", own


def test_without_limits_the_host_or_the_tmpfs_counts(tmp_path: Path, groups: tuple[Path, Path]) -> None:
    control_group(groups[0] / "pod" / "container", "max", 10, 0, 0)
    free, of = free_memory(tmp_path, cgroups=groups[0], own=groups[1])
    assert of in ("the host", f"the tmpfs of {tmp_path}")
    assert 0 < free <= psutil.virtual_memory().total


def test_container_limit_ignores_file_cache(tmp_path: Path, groups: tuple[Path, Path]) -> None:
    """File cache is freed, and a tmpfs, which counts in it, is not."""
    control_group(groups[0] / "pod" / "container", "5000", 3000, 900, 400)
    assert free_memory(tmp_path, cgroups=groups[0], own=groups[1]) == (2500, "the container's memory limit")


def test_the_tightest_of_nested_limits_counts(tmp_path: Path, groups: tuple[Path, Path]) -> None:
    control_group(groups[0] / "pod" / "container", "5000", 1000, 0, 0)
    control_group(groups[0] / "pod", "6000", 5500, 0, 0)
    assert free_memory(tmp_path, cgroups=groups[0], own=groups[1])[0] == 500


def test_a_full_container_has_nothing_free(tmp_path: Path, groups: tuple[Path, Path]) -> None:
    control_group(groups[0] / "pod" / "container", "5000", 6000, 0, 0)
    assert free_memory(tmp_path, cgroups=groups[0], own=groups[1])[0] == 0
