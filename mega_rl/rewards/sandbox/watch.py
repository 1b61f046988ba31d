"""Memory of all processes of a sandbox, with the files in its temporary folders.

Processes end, their numbers are used again, and bubblewrap changes the root while this module looks. Each look
therefore reads one thing through one descriptor: a process through its folder in /proc, a file system by its folder.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import psutil

INODE_BYTES = 1024  # kernel memory for a file, however short
FOLDERS = ("tmp", "dev/shm")


def used_bytes(init_pid: int) -> int:
    """Return the resident memory of a process and its descendants, and their files' size.

    Shared pages count in each process. Without access to the sandbox's folders, their files do not count: those of a
    folder are limited by its size. The caller checks that `init_pid` has not ended meanwhile.
    """
    total, tree, parents = 0, [init_pid], {init_pid}
    for pid in tree:
        with contextlib.suppress(OSError, ValueError), _opened(f"/proc/{pid}") as process:
            parent, resident = _status(process)
            if pid != init_pid and parent not in parents:  # another process has got the number since
                continue
            total += resident
            parents.add(pid)
            tree += _children(process, pid)
    for name in FOLDERS:
        with contextlib.suppress(OSError), _opened(f"/proc/{init_pid}/root/{name}") as folder:
            if os.fstat(folder).st_dev in _host_devices():  # bubblewrap has not changed the root yet
                continue
            usage = os.fstatvfs(folder)
            total += (usage.f_blocks - usage.f_bfree) * usage.f_frsize + (usage.f_files - usage.f_ffree) * INODE_BYTES
    return total


def parent_of(pid: int) -> int:
    """Return the number of a process's parent. Raises OSError if the process is gone."""
    with _opened(f"/proc/{pid}") as process:
        return _status(process)[0]


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    """Yield a descriptor of a folder, which stays the same whatever happens to the path."""
    folder = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield folder
    finally:
        os.close(folder)


def _status(process: int) -> tuple[int, int]:
    """Return (parent, resident bytes) of a process by the descriptor of its folder."""
    fields = dict(line.split(":", 1) for line in _text(process, "status").splitlines())
    return int(fields["PPid"]), int(fields.get("VmRSS", "0 kB").split()[0]) << 10  # a zombie has no memory


def _children(process: int, pid: int) -> list[int]:
    tasks = os.open("task", os.O_RDONLY | os.O_DIRECTORY, dir_fd=process)
    try:
        texts = [_text(tasks, f"{task}/children") for task in os.listdir(tasks)]
    except FileNotFoundError:  # a thread has ended, or a kernel without CONFIG_PROC_CHILDREN
        with contextlib.suppress(psutil.Error):
            return [child.pid for child in psutil.Process(pid).children()]
        return []
    finally:
        os.close(tasks)
    return [int(child) for text in texts for child in text.split()]


def _text(folder: int, name: str) -> str:
    with open(os.open(name, os.O_RDONLY, dir_fd=folder), encoding="utf-8", errors="replace") as file:
        return file.read()


def _host_devices() -> set[int]:
    """Return the file systems of this machine that the folders' paths name outside of a sandbox."""
    return {os.stat(path).st_dev for path in ("/", *(f"/{folder}" for folder in FOLDERS)) if os.path.exists(path)}
