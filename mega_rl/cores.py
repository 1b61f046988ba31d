"""Processor cores of this host that a process may use, and a rank's share of them. No torch."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")


def threads_per_rank(local_ranks: int) -> int:
    """Return each rank's share of the physical cores that this process may use, at least 1."""
    return max(1, usable_cores() // local_ranks)


def own_cores() -> int:
    """Return this rank's share of its host's cores, as `threads_per_rank`."""
    return threads_per_rank(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def usable_cores() -> int:
    """Return the physical cores this process may use: by its affinity, and by a container's limit, rounded up."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(psutil.cpu_count(logical=False) or allowed, allowed, _container_limit() or allowed))


def _container_limit() -> int | None:
    """Return the processors that a control group grants, None without a limit."""
    try:
        quota, period = (CGROUP / "cpu.max").read_text().split()
        return None if quota == "max" else -(-int(quota) // int(period))
    except (OSError, ValueError):  # no control groups of version 2
        return None
