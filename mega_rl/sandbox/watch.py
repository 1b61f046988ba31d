"""Memory that the processes of a sandbox use together, with what they keep in its temporary folders."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import psutil

PAGE = os.sysconf("SC_PAGE_SIZE")
INODE_BYTES = 1024  # of kernel memory for a file, however short
FOLDERS = ("tmp", "dev/shm")


def used_bytes(init_pid: int) -> int:
    """Return the resident memory of a process and of all that descend from it, and the size of their files.

    Shared pages count in each process. Without access to the sandbox's folders, their files do not count: those of a
    folder are limited by its size.
    """
    total = 0
    for pid in _tree(init_pid):
        with contextlib.suppress(OSError, IndexError, ValueError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
    for folder in FOLDERS:
        with contextlib.suppress(OSError):
            inside = f"/proc/{init_pid}/root/{folder}"
            if os.stat(inside).st_dev in _host_devices():  # bubblewrap has not changed the root yet
                continue
            usage = os.statvfs(inside)
            total += (usage.f_blocks - usage.f_bfree) * usage.f_frsize + (usage.f_files - usage.f_ffree) * INODE_BYTES
    return total


def _host_devices() -> set[int]:
    """Return the file systems of this machine that the folders' paths name outside of a sandbox."""
    return {os.stat(path).st_dev for path in ("/", *(f"/{folder}" for folder in FOLDERS)) if os.path.exists(path)}


def _tree(pid: int) -> list[int]:
    """Return a process and its descendants."""
    tree, at = [pid], 0
    while at < len(tree):
        tree += _children(tree[at])
        at += 1
    return tree


def _children(pid: int) -> list[int]:
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
        texts = [Path(f"/proc/{pid}/task/{task}/children").read_text() for task in tasks]
    except FileNotFoundError:  # it has ended, or a kernel without CONFIG_PROC_CHILDREN
        with contextlib.suppress(psutil.Error):
            return [child.pid for child in psutil.Process(pid).children()]
        return []
    except OSError:
        return []
    return [int(child) for text in texts for child in text.split()]
