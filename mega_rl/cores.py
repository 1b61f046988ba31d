"""Processor cores of this host that a process may use, and a rank's share of them. No torch."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")
SYSFS = Path("/sys")
_before: set[int] = set()  # the processors of this process before it was bound to some of them


def bind_near(pci: str) -> None:
    """Bind this thread, and those that it starts, to the processors next to a PCI device, such as "0000:3b:00.0".

    The kernel puts pinned memory near the thread that touches it first, and copies between sockets take twice as long.
    No effect where the machine names no NUMA node for the device or this process may use none of its processors.
    """
    try:
        node = (SYSFS / "bus" / "pci" / "devices" / pci / "numa_node").read_text().strip()
        spans = (SYSFS / "devices" / "system" / "node" / f"node{node}" / "cpulist").read_text().strip().split(",")
        ends = [(int(first), int(last or first)) for first, _, last in (span.partition("-") for span in spans)]
    except (OSError, ValueError):
        return
    allowed = processors()
    if near := allowed & {cpu for first, last in ends for cpu in range(first, last + 1)}:
        _before.update(allowed)
        os.sched_setaffinity(0, near)


def processors() -> set[int]:
    """Return the processors that this process might use before `bind_near`; programs that it starts get them."""
    return set(_before) or os.sched_getaffinity(0)


def threads_per_rank(local_ranks: int) -> int:
    """Return each rank's share, at least 1, of the physical cores that this process may use."""
    allowed = len(processors())
    usable = min(psutil.cpu_count(logical=False) or allowed, allowed, _container_limit() or allowed)
    return max(1, usable // local_ranks)


def own_cores() -> int:
    """Return this rank's share of its host's cores, as `threads_per_rank`."""
    return threads_per_rank(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _container_limit() -> int | None:
    """Return the processors that a control group grants, None without a limit."""
    try:
        quota, period = (CGROUP / "cpu.max").read_text().split()
        return None if quota == "max" else -(-int(quota) // int(period))
    except (OSError, ValueError):  # no control groups of version 2
        return None
