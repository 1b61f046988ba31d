"""Parts of shards on their way between hosts, read from one file and written into another. No torch."""

from __future__ import annotations

import os
from pathlib import Path

from mega_rl.storage import disk
from mega_rl.storage.disk import SaveError
from mega_rl.storage.untrusted import open_regular, read_at


def read_from(path: Path, start: int, buffer: memoryview) -> None:
    """Fill a buffer with the bytes of a file from `start` on. Raises SaveError or UserError."""
    fd, _ = open_regular(path)
    try:
        data = read_at(fd, start, len(buffer), path)
    finally:
        os.close(fd)
    if len(data) != len(buffer):
        raise SaveError(f"{path}: ends before byte {start + len(buffer)}")
    buffer[:] = data


def write_into(path: Path, start: int, buffer: memoryview) -> None:
    """Write bytes into a file that is there. Raises SaveError."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise SaveError(f"{path}: cannot be written ({error.strerror})") from error
    try:
        disk.write_at(fd, start, [buffer])
    finally:
        os.close(fd)
