"""Control groups of the kernel: every process of a case, wherever it went, and limits on some of them; needs root."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
NAME = "mega_rl_campaign"


class ControlGroup:
    """A group under one controller; the children of its processes are born into it.

    controller: pids, memory, cpu or freezer, of version 1 of the kernel's interface or of version 2, where it is one
    tree for all.
    """

    def __init__(self, controller: str, name: str) -> None:
        self.unified = (ROOT / "cgroup.controllers").exists()
        self._controller = controller
        root = ROOT if self.unified else ROOT / controller
        self.folder = root / NAME / name
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.unified:
            for parent in (root, root / NAME):
                (parent / "cgroup.subtree_control").write_text(f"+{controller}")

    def add(self, pid: int) -> None:
        """Move a process, all its threads, into the group."""
        (self.folder / "cgroup.procs").write_text(str(pid))

    @contextmanager
    def around(self) -> Iterator[None]:
        """Have what this process starts be born into the group."""
        line = next(
            line for line in Path("/proc/self/cgroup").read_text().splitlines() if self._is_line(line.split(":")[1])
        )
        before = (ROOT if self.unified else ROOT / self._controller) / line.split(":")[2].lstrip("/")
        self.add(os.getpid())
        try:
            yield
        finally:
            (before / "cgroup.procs").write_text(str(os.getpid()))

    def _is_line(self, controllers: str) -> bool:
        return controllers == "" if self.unified else self._controller in controllers.split(",")

    def members(self) -> list[int]:
        """Return the processes of the group, zombies left out."""
        try:
            listed = (self.folder / "cgroup.procs").read_text().split()
        except FileNotFoundError:  # removed already
            return []
        return [pid for pid in map(int, listed) if not is_zombie(pid)]

    def set(self, name: str, value: str) -> None:
        """Write a control file."""
        (self.folder / name).write_text(value)

    def limit_cpu(self, share: float) -> None:
        """Let the group have this share of one core."""
        if self.unified:
            self.set("cpu.max", f"{int(share * 100_000)} 100000")
        else:
            self.set("cpu.cfs_quota_us", str(int(share * 100_000)))

    def limit_memory(self, nbytes: int) -> None:
        """Have the kernel kill a process of the group that would take it beyond so many bytes."""
        self.set("memory.max" if self.unified else "memory.limit_in_bytes", str(nbytes))

    def close(self, *, deadline_s: float = 10.0) -> None:
        """Kill what is left, then remove the group."""
        deadline = time.monotonic() + deadline_s
        while (left := self.members()) and time.monotonic() < deadline:
            for pid in left:
                kill(pid)
            time.sleep(0.02)
        while self.folder.exists():
            try:
                self.folder.rmdir()
            except OSError:  # zombies count until they are reaped
                if time.monotonic() > deadline:
                    return
                time.sleep(0.02)


def leftover_groups(prefix: str) -> list[tuple[str, str]]:
    """Return the controller and the name of every group whose name begins so."""
    groups = set()
    for controller in ("pids", "memory", "cpu"):
        root = ROOT if (ROOT / "cgroup.controllers").exists() else ROOT / controller
        groups |= {(controller, folder.name) for folder in (root / NAME).glob(f"{prefix}*")}
    return sorted(groups)


def is_zombie(pid: int) -> bool:
    """Return whether a process has ended and was not waited for; true of one that is gone as well."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def kill(pid: int, number: int = signal.SIGKILL) -> bool:
    """Send a signal; returns whether the process was there."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
