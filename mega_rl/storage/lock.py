"""Lock files: one process at a time, freed by the kernel however that process ends. No torch."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path


def lock_file(path: Path) -> int:
    """Open a file, made if it is missing, take its lock without waiting, and return its descriptor.

    A holder may remove the file before it closes the descriptor.

    Raises:
        BlockingIOError: another process holds the lock.
        OSError: the file cannot be opened, or is a link.
    """
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        try:
            with contextlib.suppress(OSError):  # another user's file
                os.fchmod(fd, 0o600)  # whoever may read a file may hold its lock
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(fd), path.stat()):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # the previous holder has removed the file between open and lock
