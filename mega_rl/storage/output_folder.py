"""Output folders that appear complete or not at all, and the files written into them. No torch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from mega_rl.errors import UserError, in_units
from mega_rl.storage.lock import lock_file
from mega_rl.storage.safetensors_header import INDEX_FILE, SINGLE_FILE

# One of these is in every folder that may be overwritten, so that a slip of the pen removes no other folder.
MARKERS = ("config.json", SINGLE_FILE, INDEX_FILE, "mega_rl.json", ".metadata")


@contextmanager
def output_folder(target: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary folder beside `target` that becomes `target` at the end of the block; an error removes it.

    A killed run leaves the temporary folder, whose name starts with a dot; the next run of the same target removes it.
    With `overwrite` an existing checkpoint is replaced as a whole.

    Raises UserError when the target exists and is not empty (and, with `overwrite`, is no checkpoint), or when another
    process is writing it.
    """
    target = Path(os.path.abspath(target))
    work, old, lock = (target.with_name(f".{target.name}.{suffix}") for suffix in ("partial", "old", "lock"))
    with name_file(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(lock, target):
        if old.exists() and not target.exists():
            old.rename(target)  # a run was killed between the two renames below
        check_target(target, overwrite=overwrite)
        for leftover in (work, old):
            shutil.rmtree(leftover, ignore_errors=True)
        try:
            with name_file(work):
                work.mkdir()
            yield work
            with name_file(work):
                _replace(target, work, old, overwrite=overwrite)
        except BaseException:
            if old.exists() and not target.exists():
                old.rename(target)
            shutil.rmtree(work, ignore_errors=True)
            raise
        shutil.rmtree(old, ignore_errors=True)


def _replace(target: Path, work: Path, old: Path, *, overwrite: bool) -> None:
    """Rename `work` to `target`, durably; with `overwrite` an existing target to `old` first."""
    sync_folder(work)
    if overwrite and target.exists():
        target.rename(old)
    # rename replaces an empty directory, and fails on one that was filled in the meantime.
    work.rename(target)
    sync_folder(target.parent)


def check_target(target: Path, *, overwrite: bool) -> None:
    """Check that a folder of this name may be written. Raises UserError as `output_folder`."""
    if not target.exists() and not target.is_symlink():
        return
    if not target.is_dir() or target.is_symlink():
        raise UserError(f"{target}: exists and is not a directory; choose another name or remove it")
    if not any(target.iterdir()):
        return
    if not overwrite:
        raise UserError(f"{target}: exists and is not empty; choose another directory, or give --overwrite")
    if not any((target / marker).exists() for marker in MARKERS):
        raise UserError(f"{target}: is not a checkpoint (it holds none of {', '.join(MARKERS)}); it is not overwritten")


@contextmanager
def _locked(path: Path, target: Path) -> Iterator[None]:
    """Hold the lock of a target; the kernel frees that of a killed process."""
    with name_file(path):
        try:
            fd = lock_file(path)
        except BlockingIOError as error:
            raise UserError(f"{target}: another process is writing it; choose another directory") from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(fd)


def copy_files(folder: Path, files: Mapping[str, Path]) -> None:
    """Copy files (name, or folder/name -> source) into a folder byte for byte, and flush them to disk."""
    for name, source in files.items():
        target = folder / name
        with name_file(target):
            target.parent.mkdir(exist_ok=True)
            with source.open("rb") as read, target.open("xb") as write:
                shutil.copyfileobj(read, write)
                write.flush()
                os.fsync(write.fileno())
            sync_folder(target.parent)


def write_file(path: Path, content: bytes) -> None:
    """Write a new file and flush it to disk."""
    with name_file(path), path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def require_space(folder: Path, nbytes: int) -> None:
    """Check that the disk of a folder has `nbytes` free. Raises UserError."""
    free = _free_bytes(folder)
    if free < nbytes:
        raise UserError(f"{folder}: {in_units(nbytes)} are to be written, but its disk has {in_units(free)} free")


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _free_bytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


@contextmanager
def name_file(path: Path) -> Iterator[None]:
    """Turn an OSError into a UserError that names the file and the free space."""
    try:
        yield
    except OSError as error:
        folder = next((p for p in (path, *path.parents) if p.is_dir()), Path("."))
        raise UserError(
            f"{path}: cannot be written ({error.strerror}); its disk has {in_units(_free_bytes(folder))} free"
        ) from error
