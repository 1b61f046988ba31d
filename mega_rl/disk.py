"""Durable changes of files and folders, and locks. Errors name the file.

Every system call goes through the name `os`: a test that replaces it sees each write, fsync, rename and unlink.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from mega_rl.errors import RunError

IOV_MAX = 1024  # buffers in one pwritev


class SaveError(RunError):
    """A checkpoint could not be written; the message names the file and the operating system's error."""


def make_folder(path: Path) -> None:
    """Make a folder and its missing parents, durably; an existing one stays as it is."""
    with _naming(path):
        missing = [folder for folder in (path, *path.parents) if not folder.is_dir()]
        for folder in reversed(missing):
            with suppress(FileExistsError):  # another process was faster
                os.mkdir(folder)
            sync_folder(folder.parent)


def open_new(path: Path) -> int:
    """Create a file, which must not exist, and return a descriptor to write it."""
    with _naming(path):
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)


def open_again(path: Path) -> int:
    """Return a descriptor to write into a file that exists."""
    with _naming(path):
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)


def write_at(fd: int, offset: int, buffers: Sequence[memoryview]) -> None:
    """Write all buffers one after the other, from `offset` on."""
    left = [buffer for buffer in buffers if len(buffer)]
    with _naming(fd):
        while left:
            count = os.pwritev(fd, left[:IOV_MAX], offset)
            if count == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            offset += count
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = left[0][count:]


def sync(fd: int) -> None:
    """Flush a file's bytes to the disk."""
    with _naming(fd):
        os.fsync(fd)


def close(fd: int) -> None:
    """Close a file; some file systems report errors of earlier writes only here."""
    with _naming(fd):
        os.close(fd)


def write_text(path: Path, text: str) -> None:
    """Write a new file durably, except for its name, which `sync_folder` makes durable."""
    fd = open_new(path)
    try:
        write_at(fd, 0, [memoryview(text.encode())])
        sync(fd)
    finally:
        os.close(fd)


def replace_text(path: Path, text: str) -> None:
    """Replace a file's content atomically and durably: a reader sees the old content or this one."""
    hidden = path.with_name(f".{path.name}.new")
    remove_file(hidden)
    write_text(hidden, text)
    rename(hidden, path)
    sync_folder(path.parent)


def rename(source: Path, target: Path) -> None:
    """Rename a file or folder; replaces a file at `target` but fails for a non-empty folder."""
    with _naming(target):
        os.rename(source, target)


def sync_folder(path: Path) -> None:
    """Flush the names in a folder to the disk."""
    with _naming(path):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def remove_file(path: Path) -> None:
    """Remove a file or link, if it exists."""
    with _naming(path), suppress(FileNotFoundError):
        os.unlink(path)


def remove_tree(path: Path) -> None:
    """Remove a folder with its content, or a file. Links are removed, never followed."""
    with _naming(path):
        if path.is_symlink() or not path.is_dir():
            remove_file(path)
            return
        for entry in list(path.iterdir()):
            remove_tree(entry)
        os.rmdir(path)


def free_bytes(path: Path) -> int:
    """Return the free bytes of the disk of a path, which need not exist."""
    with _naming(path):
        status = os.statvfs(next(folder for folder in (path, *path.absolute().parents) if folder.exists()))
        return status.f_bavail * status.f_frsize


def lock_file(path: Path) -> int:
    """Take the lock of a file, which is created if missing, without waiting; return its descriptor.

    The kernel frees the lock however its process ends. A holder may remove the file before it closes the descriptor.

    Raises BlockingIOError if another process holds the lock, OSError for a link or a file that cannot be opened.
    """
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        try:
            with suppress(OSError):  # another user's file
                os.fchmod(fd, 0o600)  # a process that may read the file could hold its lock
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(fd), path.stat()):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # the previous holder removed the file between open and lock


@contextmanager
def _naming(target: Path | int) -> Iterator[None]:
    """Turn an OSError into a SaveError that names the file, which may be a descriptor."""
    try:
        yield
    except OSError as error:
        where = Path(f"/proc/self/fd/{target}") if isinstance(target, int) else target
        with suppress(OSError):
            where = where.readlink() if isinstance(target, int) else where
        raise SaveError(f"{where}: cannot be written ({error.strerror or error})") from error
