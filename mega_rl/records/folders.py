"""Folders of a run's records: names, sizes, and the bound that they keep together. No torch."""

from __future__ import annotations

import os
import re
from pathlib import Path

from mega_rl.storage import disk

FOLDER = "records"  # of a run
_STEP = re.compile(r"step_([0-9]{6,12})")
_HIDDEN = re.compile(r"\.step_[0-9]{6,12}\.(?:tmp|removed)")


def final(root: Path, step: int) -> Path:
    """Return the folder of the record of a step, counted from 1."""
    return root / f"step_{step:06d}"


def temporary(root: Path, step: int) -> Path:
    """Return the hidden folder in which a record is written."""
    return root / f".{final(root, step).name}.tmp"


def records(root: Path) -> list[Path]:
    """Return the folders of complete records, oldest first."""
    names = os.listdir(root) if root.is_dir() else []
    steps = {int(match[1]): root / name for name in names if (match := _STEP.fullmatch(name))}
    return [steps[step] for step in sorted(steps)]


def begin(root: Path, step: int) -> Path:
    """Return an empty hidden folder to write the record of a step in. Raises SaveError."""
    folder = temporary(root, step)
    disk.remove_tree(folder)
    disk.make_folder(folder)
    return folder


def publish(root: Path, step: int) -> Path:
    """Give a written record its name, in place of an earlier one of that step. Raises SaveError."""
    work, target = temporary(root, step), final(root, step)
    for path in (path for path in work.rglob("*") if path.is_dir()):
        disk.sync_folder(path)
    disk.sync_folder(work)
    _remove(target)
    disk.rename(work, target)
    disk.sync_folder(root)
    return target


def clear(root: Path, *, after: int) -> None:
    """Remove records of steps after `after`, which a run will do again, and what killed runs have left.

    Raises SaveError.
    """
    for name in os.listdir(root) if root.is_dir() else []:
        if _HIDDEN.fullmatch(name):
            disk.remove_tree(root / name)
    for folder in records(root):
        if int(folder.name.removeprefix("step_")) > after:
            _remove(folder)


def make_room(root: Path, nbytes: int, *, limit: int) -> bool:
    """Remove the oldest records until `nbytes` more keep to the limit; return whether they do. Raises SaveError."""
    if nbytes > limit:
        return False
    sizes = {folder: size_of(folder) for folder in records(root)}
    total = sum(sizes.values())
    for folder, size in sizes.items():
        if total + nbytes <= limit:
            break
        _remove(folder)
        total -= size
    return True


def size_of(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


def _remove(folder: Path) -> None:
    """Remove a record under a hidden name, so that a kill in between leaves no half one."""
    if folder.is_dir() and not folder.is_symlink():
        hidden = folder.with_name(f".{folder.name}.removed")
        disk.remove_tree(hidden)
        disk.rename(folder, hidden)
        disk.remove_tree(hidden)
