"""Read the state of processes, memory limits and memory kills from the kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")
SHORT_OF_MEMORY = 0.05  # share of the memory
MAX_BYTES = 65_536  # read of a file of the kernel

# Letters of /proc/PID/stat.
STATES: Mapping[str, str] = {
    "R": "running",
    "S": "waiting",
    "D": "in the kernel, where nothing interrupts it: a file system or a device does not answer",
    "T": "stopped",
    "t": "stopped by a debugger",
    "Z": "ended",
    "X": "ended",
}


@dataclass(frozen=True)
class ProcessState:
    """State of a process at one moment."""

    state: str  # a letter of `STATES`, empty if the process is gone
    exit_signal: int = 0  # the signal that ended a zombie
    wait: str = ""  # the kernel function it waits in, if readable

    @property
    def stopped(self) -> bool:
        """Return whether a signal or a debugger has stopped the process."""
        return self.state in ("T", "t")

    @property
    def alive(self) -> bool:
        """Return whether the process exists and is not a zombie."""
        return self.state not in ("", "Z", "X")


GONE = ProcessState("")


def process_state(pid: int, started: int = 0) -> ProcessState:
    """Return the state of a process; `GONE` if another process has its number by now.

    started: `start_time` of the process, 0 if unknown.
    """
    fields = _stat(pid)
    if len(fields) < 20 or (started and int(fields[19]) != started):
        return GONE
    code = int(fields[49]) if len(fields) > 49 and fields[0] == "Z" else 0
    return ProcessState(fields[0], exit_signal=code & 0x7F, wait=_read(PROC / str(pid) / "wchan").strip("0\n"))


def start_time(pid: int) -> int:
    """Return the kernel's time of a process's start, 0 if it cannot be read."""
    fields = _stat(pid)
    return int(fields[19]) if len(fields) >= 20 else 0


def catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal."""
    for line in _read(PROC / str(pid) / "status").splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def memory_limit() -> tuple[int, int]:
    """Return (used, limit) bytes of this process's control group with the least left; (0, 0) without a limit.

    File cache does not count as used, as the kernel frees it first; a tmpfs does.
    """
    own = _cgroup_folder()
    limits = []
    for folder in (own, *own.parents):
        for used, limit in (("memory.current", "memory.max"), ("memory.usage_in_bytes", "memory.limit_in_bytes")):
            texts = [_read(folder / name).strip() for name in (used, limit)]
            if all(text.isdigit() for text in texts) and int(texts[1]) < 1 << 60:
                limits.append((int(texts[0]) - _file_cache(folder), int(texts[1])))
    return min(limits, key=lambda each: each[1] - each[0], default=(0, 0))


def _file_cache(group: Path) -> int:
    lines = _read(group / "memory.stat").splitlines()
    counts = {name: int(value) for name, value in (line.split() for line in lines)}
    return max(0, counts.get("file", counts.get("cache", 0)) - counts.get("shmem", 0))


def memory_full() -> bool:
    """Return whether less than `SHORT_OF_MEMORY` of this host's or control group's memory is free."""
    used, limit = memory_limit()
    memory = psutil.virtual_memory()
    group_is_full = limit > 0 and used > (1 - SHORT_OF_MEMORY) * limit
    return group_is_full or memory.available < SHORT_OF_MEMORY * memory.total


def kills_for_memory() -> int:
    """Return how many processes of this control group, else host, were killed for memory."""
    folder = _cgroup_folder()
    for path in (folder / "memory.events", folder / "memory.oom_control", PROC / "vmstat"):
        for line in _read(path).splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill" and count.strip().isdigit():
                return int(count)
    return 0


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the program's name, which may hold blanks and brackets."""
    fields = _read(PROC / str(pid) / "stat").rpartition(")")[2].split()
    return fields if len(fields) < 20 or fields[19].isdigit() else []


def _cgroup_folder() -> Path:
    """Return the control group of this process with a memory controller, of version 2 or 1."""
    for line in _read(PROC / "self" / "cgroup").splitlines():
        _, controllers, place = [*line.split(":", 2), "", ""][:3]
        base = CGROUP / "memory" if "memory" in controllers.split(",") else CGROUP if not controllers else None
        if base is None:
            continue
        for folder in (base / place.lstrip("/"), base):
            if any((folder / name).exists() for name in ("memory.current", "memory.usage_in_bytes")):
                return folder
    return CGROUP


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES).decode(errors="replace")
    except OSError:
        return ""
