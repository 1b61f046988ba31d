"""Folders of checkpoints in a host's memory, on a tmpfs that outlives the processes of a run. No torch.

    /dev/shm/mega_rl-1000/            of one user, whom alone it admits
      3f0c6e...-9b1d02.../            hash of the run folder's real path, and the token of its history
        run.json                      the run folder, for people
        step_000012/                  a checkpoint as on disk

The token stands in the run folder, `checkpoints/.memory`. It changes whenever a run starts from anything else than
memory, so that what is left of a history that the run has abandoned, or of a folder that was removed, is never loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import stat
from pathlib import Path

from mega_rl.errors import UserError
from mega_rl.storage import disk
from mega_rl.storage.disk import SaveError
from mega_rl.storage.untrusted import decode_json, read_file

SHM = Path("/dev/shm")
HISTORY_FILE = ".memory"  # in the run's folder of checkpoints
RUN_FILE = "run.json"
HINT = "set checkpoint.memory.interval=0, or remove it"
_TOKEN = re.compile(r"[0-9a-f]{16}")
_NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{16}")
_MAX_BYTES = 1 << 16


def user_folder(shm: Path) -> Path:
    """Return the folder of this user."""
    return shm / f"mega_rl-{os.geteuid()}"


def folder_of(shm: Path, run_dir: str, history: str) -> Path:
    """Return the folder of one history of a run. run_dir: the real path, as rank 0 has it."""
    return user_folder(shm) / f"{_hash(run_dir)}-{history}"


def new_history() -> str:
    """Return a new token."""
    return secrets.token_hex(8)


def read_history(root: Path) -> str:
    """Return the token in a run's folder of checkpoints; "" without a valid one."""
    try:
        token = read_file(root / HISTORY_FILE, _MAX_BYTES).decode(errors="replace").strip()
    except UserError:
        return ""
    return token if _TOKEN.fullmatch(token) else ""


def write_history(root: Path, token: str) -> None:
    """Put the token into a run's folder of checkpoints, durably; "" removes it. Raises SaveError."""
    if token:
        disk.replace_text(root / HISTORY_FILE, f"{token}\n")
    else:
        disk.remove_file(root / HISTORY_FILE)


def make(folder: Path, run_dir: str) -> None:
    """Make the folder of a run, which admits this user alone. Raises SaveError where another user has made it."""
    for each in (folder.parent, folder):
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(each, 0o700)
        except OSError as error:
            raise SaveError(f"{each}: cannot be made ({error.strerror}); {HINT}") from error
        if why := foreign(each):
            raise SaveError(f"{each}: {why}; {HINT}")
    disk.replace_text(folder / RUN_FILE, json.dumps({"run_dir": run_dir}) + "\n")


def foreign(folder: Path) -> str:
    """Return why a folder is not one that this user alone may enter, "" if it is; it must be there."""
    try:
        status = os.lstat(folder)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if not stat.S_ISDIR(status.st_mode):
        return "is a link" if stat.S_ISLNK(status.st_mode) else "is not a folder"
    if status.st_uid != os.geteuid():
        return f"belongs to the user with number {status.st_uid}"
    if status.st_mode & 0o077:
        return f"admits other users (mode {stat.S_IMODE(status.st_mode):o})"
    return ""


def unusable(folder: Path) -> str:
    """Return why the folder of a run may not be read: "PATH: reason"; "" if it may, or is not there."""
    for each in (folder.parent, folder):
        if not os.path.lexists(each):
            return ""
        if why := foreign(each):
            return f"{each}: {why}"
    return ""


def folders_of_runs(shm: Path) -> list[Path]:
    """Return the folders that runs of this user have in memory; none where the user's folder is another's."""
    parent = user_folder(shm)
    if not os.path.lexists(parent) or foreign(parent):
        return []
    return sorted(path for path in parent.iterdir() if _NAME.fullmatch(path.name) and not foreign(path))


def run_dir_of(folder: Path) -> str:
    """Return the run folder of a folder in memory, "" where it does not say."""
    try:
        value = decode_json(read_file(folder / RUN_FILE, _MAX_BYTES), folder / RUN_FILE).get("run_dir")
    except UserError:
        return ""
    return value if isinstance(value, str) else ""


def remove(folder: Path) -> None:
    """Remove the folder of a run, and that of the user if it is empty then. Raises SaveError."""
    disk.remove_tree(folder)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()


def remove_others(shm: Path, run_dir: str, *, history: str) -> None:
    """Remove what other histories of a run have left here. history: the one to keep, "" for none. Raises SaveError."""
    kept = folder_of(shm, run_dir, history)
    for folder in folders_of_runs(shm):
        if folder != kept and folder.name.startswith(f"{_hash(run_dir)}-"):
            remove(folder)


def _hash(run_dir: str) -> str:
    return hashlib.sha256(os.fsencode(run_dir)).hexdigest()[:16]
