"""Every change that a save makes to the disk. No torch.

All of them are here, and every system call of this module goes through its name `os`: a test that replaces that name
sees each write, fsync, rename and unlink of a save, and can end the process before or after it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mega_rl.errors import RunError

IOV_MAX = 1024  # buffers in one pwritev


class SaveError(RunError):
    """A checkpoint that could not be written: names the file and what the operating system said."""


def make_folder(path: Path) -> None:
    """Makes a folder and those above it, durably; one that is there already is left as it is."""
    with _naming(path):
        missing = [folder for folder in (path, *path.parents) if not folder.is_dir()]
        for folder in reversed(missing):
            try:
                os.mkdir(folder)
            except FileExistsError:
                if not folder.is_dir():
                    raise
            _sync_folder(folder.parent)


def open_new(path: Path) -> int:
    """A descriptor to write a file that must not be there yet."""
    with _naming(path):
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)


def write_at(fd: int, offset: int, buffers: Sequence[memoryview]) -> None:
    """Writes buffers of bytes one after the other, all of them, from `offset` on."""
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
    """Returns when the file's bytes are on the disk."""
    with _naming(fd):
        os.fsync(fd)


def close(fd: int) -> None:
    """Closes a file; some file systems tell only now what went wrong."""
    with _naming(fd):
        os.close(fd)


def write_text(path: Path, text: str) -> None:
    """Writes a new file durably, except for its name: that is `sync_folder`'s."""
    fd = open_new(path)
    try:
        write_at(fd, 0, [memoryview(text.encode())])
        sync(fd)
    finally:
        os.close(fd)


def replace_text(path: Path, text: str) -> None:
    """Gives a file this content at once and durably: whoever reads it sees the content before or this one."""
    hidden = path.with_name(f".{path.name}.new")
    remove_file(hidden)
    write_text(hidden, text)
    rename(hidden, path)
    sync_folder(path.parent)


def rename(source: Path, target: Path) -> None:
    """Gives a file or folder another name; a file that has it is replaced, a folder that is not empty is an error."""
    with _naming(target):
        os.rename(source, target)


def sync_folder(path: Path) -> None:
    """Returns when the names in a folder are on the disk."""
    with _naming(path):
        _sync_folder(path)


def remove_file(path: Path) -> None:
    """Removes a file or link; nothing to do where there is none."""
    with _naming(path):
        try:
            os.unlink(path)
        except FileNotFoundError:
            return


def remove_tree(path: Path) -> None:
    """Removes a folder and all in it, or a file. Links are removed, never followed."""
    with _naming(path):
        if not path.is_dir() or path.is_symlink():
            remove_file(path)
            return
        with os.scandir(path) as found:
            entries = list(found)
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                remove_tree(Path(entry.path))
            else:
                remove_file(Path(entry.path))
        os.rmdir(path)


def free_bytes(path: Path) -> int:
    """What the disk of a path, there or not yet, has room for."""
    with _naming(path):
        status = os.statvfs(next(folder for folder in (path, *path.absolute().parents) if folder.exists()))
        return status.f_bavail * status.f_frsize


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def _naming(target: Path | int) -> Iterator[None]:
    """Turns an error of the operating system into a SaveError that names the file."""
    try:
        yield
    except OSError as error:
        raise SaveError(f"{_path_of(target)}: cannot be written ({error.strerror or error})") from error


def _path_of(target: Path | int) -> Path | str:
    """The path, also of a descriptor."""
    if isinstance(target, Path):
        return target
    try:
        return os.readlink(f"/proc/self/fd/{target}")
    except OSError:
        return f"file descriptor {target}"
