"""Host memory that may still be written to a tmpfs. No torch."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

from mega_rl.storage import disk

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


def free_memory(folder: Path, *, cgroups: Path = CGROUPS, own: Path = OWN_CGROUP) -> tuple[int, str]:
    """Return the fewest free bytes, and of what: the tmpfs of a folder, the host, or a control group (container).

    A control group kills a process that goes beyond its limit, and a tmpfs counts in it.
    """
    limits = [(disk.free_bytes(folder), f"the tmpfs of {folder}"), (psutil.virtual_memory().available, "the host")]
    return min([*limits, *_of_control_groups(cgroups, own)])


def _of_control_groups(cgroups: Path, own: Path) -> list[tuple[int, str]]:
    """Return (free bytes, name) of this process's control group and those above it that have a limit."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    path = next((line.removeprefix("0::").strip("/") for line in lines if line.startswith("0::")), "")
    group = cgroups / path
    limits = []
    for folder in (group, *group.parents):
        if not folder.is_relative_to(cgroups):
            break
        with contextlib.suppress(OSError, ValueError):  # the root has no such files
            limit = (folder / "memory.max").read_text().strip()
            if limit != "max":
                used = int((folder / "memory.current").read_text()) - _reclaimable(folder)
                limits.append((max(0, int(limit) - used), "the container's memory limit"))
    return limits


def _reclaimable(group: Path) -> int:
    """Return the bytes of a control group's file cache, which the kernel frees before it kills; tmpfs is not among."""
    words = [line.split() for line in (group / "memory.stat").read_text().splitlines()]
    numbers = {name: int(value) for name, value in words}
    return max(0, numbers.get("file", 0) - numbers.get("shmem", 0))
