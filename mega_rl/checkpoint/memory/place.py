"""Folders of checkpoints in a host's memory, and the free space there.

    /dev/shm/mega_rl-1000/            folder of one user, mode 0700
      3f0c6e...-9b1d02.../            hash of the run folder's real path, and the token of its history
        run.json                      the run folder, for people
        step_000012/                  a checkpoint as on disk

The token is in the run folder, `checkpoints/.memory`. It changes whenever a run starts from anything else than memory,
so a run never loads an abandoned history, or that of a folder that was removed.
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

import psutil

from mega_rl import disk
from mega_rl.disk import SaveError
from mega_rl.errors import UserError
from mega_rl.untrusted import decode_json, read_file

SHM = Path("/dev/shm")
HISTORY_FILE = ".memory"  # in the run's folder of checkpoints
CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
RUN_FILE = "run.json"
HINT = "set checkpoint.memory.interval=0, or remove it"
_TOKEN = re.compile(r"[0-9a-f]{16}")
_NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{16}")
_MAX_BYTES = 1 << 16


def user_folder(shm: Path) -> Path:
    """Return the folder of this user."""
    return shm / f"mega_rl-{os.geteuid()}"


def folder_of(shm: Path, run_dir: str, history: str) -> Path:
    """Return the folder of a run's history. run_dir: rank 0's real path."""
    return user_folder(shm) / f"{_hash(run_dir)}-{history}"


def new_history() -> str:
    """Return a new token."""
    return secrets.token_hex(8)


def read_history(root: Path) -> str:
    """Return the token in a run's folder of checkpoints, "" without a valid one."""
    try:
        token = read_file(root / HISTORY_FILE, _MAX_BYTES).decode(errors="replace").strip()
    except UserError:
        return ""
    return token if _TOKEN.fullmatch(token) else ""


def write_history(root: Path, token: str) -> None:
    """Write the token into a run's folder of checkpoints; "" removes it. Raises SaveError."""
    if token:
        disk.replace_text(root / HISTORY_FILE, f"{token}\n")
    else:
        disk.remove_file(root / HISTORY_FILE)


def make(folder: Path, run_dir: str) -> None:
    """Make a run's folder, only for this user. Raises SaveError for a foreign one."""
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
    """Return why other users may enter an existing folder, "" if only this user may."""
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
    """Return why the folder of a run may not be read, as "PATH: reason", else ""."""
    for each in (folder.parent, folder):
        if not os.path.lexists(each):
            return ""
        if why := foreign(each):
            return f"{each}: {why}"
    return ""


def folders_of_runs(shm: Path) -> list[Path]:
    """Return the folders of this user's runs in memory, if they are safe."""
    parent = user_folder(shm)
    if not os.path.lexists(parent) or foreign(parent):
        return []
    return sorted(path for path in parent.iterdir() if _NAME.fullmatch(path.name) and not foreign(path))


def run_dir_of(folder: Path) -> str:
    """Return the run folder of a folder in memory, "" if it is unknown."""
    try:
        value = decode_json(read_file(folder / RUN_FILE, _MAX_BYTES), folder / RUN_FILE).get("run_dir")
    except UserError:
        return ""
    return value if isinstance(value, str) else ""


def remove(folder: Path) -> None:
    """Remove the folder of a run, and an empty user's folder. Raises SaveError."""
    disk.remove_tree(folder)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()


def remove_others(shm: Path, run_dir: str, *, history: str) -> None:
    """Remove other histories of a run than `history` ("": all of them). Raises SaveError."""
    kept = folder_of(shm, run_dir, history)
    for folder in folders_of_runs(shm):
        if folder != kept and folder.name.startswith(f"{_hash(run_dir)}-"):
            remove(folder)


def _hash(run_dir: str) -> str:
    return hashlib.sha256(os.fsencode(run_dir)).hexdigest()[:16]


def free_memory(folder: Path, *, cgroups: Path = CGROUPS, own: Path = OWN_CGROUP) -> tuple[int, str]:
    """Return the fewest free bytes of tmpfs, host and control groups, with its name.

    A control group kills a process that exceeds its limit, and a tmpfs counts in it. File cache does not: the kernel
    frees it first.
    """
    limits = [(disk.free_bytes(folder), f"the tmpfs of {folder}"), (psutil.virtual_memory().available, "the host")]
    return min([*limits, *_of_control_groups(cgroups, own)])


def _of_control_groups(cgroups: Path, own: Path) -> list[tuple[int, str]]:
    """Return (free bytes, name) of this process's control groups that have a limit."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    path = next((line.removeprefix("0::").strip("/") for line in lines if line.startswith("0::")), "")
    group = cgroups / path
    limits = []
    for folder in (group, *group.parents):
        if not folder.is_relative_to(cgroups):
            break
        with contextlib.suppress(OSError, ValueError):  # the root has no such files
            limit = (folder / "memory.max").read_text().strip()
            if limit != "max":
                lines = (folder / "memory.stat").read_text().splitlines()
                cache = {name: int(value) for name, value in map(str.split, lines)}
                used = int((folder / "memory.current").read_text())
                used -= max(0, cache.get("file", 0) - cache.get("shmem", 0))
                limits.append((max(0, int(limit) - used), "the container's memory limit"))
    return limits
