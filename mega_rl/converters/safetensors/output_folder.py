"""Output folders that appear complete or not at all, and the files written into them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from mega_rl.converters.safetensors.header import INDEX_FILE, SINGLE_FILE
from mega_rl.disk import SaveError, free_bytes, lock_file, sync_folder, write_text
from mega_rl.errors import UserError, in_units

# A folder may be overwritten if it has one of these files, so that a typing error removes no other folder.
MARKERS = ("config.json", SINGLE_FILE, INDEX_FILE, "mega_rl.json", ".metadata")


@contextmanager
def output_folder(target: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary folder that becomes `target` at the block's end; an error removes it.

    A killed run leaves the temporary folder, whose name starts with a dot; the next run of the same target removes it.
    With `overwrite` an existing checkpoint is replaced as a whole.

    Raises UserError when the target exists and is not empty (and, with `overwrite`, is no checkpoint), or when another
    process is writing it.
    """
    target = Path(os.path.abspath(target))
    work, old, lock = (target.with_name(f".{target.name}.{suffix}") for suffix in ("partial", "old", "lock"))
    with name_file(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    with name_file(lock):
        try:
            fd = lock_file(lock)
        except BlockingIOError as error:
            raise UserError(f"{target}: another process is writing it; choose another directory") from error
    try:
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
    finally:
        lock.unlink(missing_ok=True)
        os.close(fd)


def _replace(target: Path, work: Path, old: Path, *, overwrite: bool) -> None:
    """Rename `work` to `target`, durably; with `overwrite` an existing target to `old` first."""
    sync_folder(work)
    if overwrite and target.exists():
        target.rename(old)
    work.rename(target)  # replaces an empty directory, fails on one that was filled in the meantime
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


def copy_files(folder: Path, files: Mapping[str, Path]) -> None:
    """Copy files (name, or folder/name -> source) into a folder and flush them to disk."""
    for name, source in files.items():
        target = folder / name
        with name_file(target):
            target.parent.mkdir(exist_ok=True)
            with source.open("rb") as read, target.open("xb") as write:
                shutil.copyfileobj(read, write)
                write.flush()
                os.fsync(write.fileno())
            sync_folder(target.parent)


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Write a new file with a JSON object and flush it to disk."""
    with name_file(path):
        write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def require_space(folder: Path, nbytes: int) -> None:
    """Check that the disk of a folder has `nbytes` free. Raises UserError."""
    free = free_bytes(folder)
    if free < nbytes:
        raise UserError(f"{folder}: {in_units(nbytes)} are to be written, but its disk has {in_units(free)} free")


@contextmanager
def name_file(path: Path) -> Iterator[None]:
    """Turn a disk error into a UserError that names the file and the free space."""
    try:
        yield
    except (OSError, SaveError) as error:
        what = f"{path}: cannot be written ({error.strerror})" if isinstance(error, OSError) else str(error)
        raise UserError(f"{what}; its disk has {in_units(free_bytes(path))} free") from error
