"""Folders of checkpoints in a host's memory.

    /dev/shm/mega_rl-1000/            folder of one user, mode 0700
      3f0c6e...-9b1d02.../            hash of the run folder's real path, and the token of its history
        step_000012/                  a checkpoint as on disk

The token is in the run folder, `checkpoints/.memory`. It changes whenever a run starts from anything else than memory,
so a run never loads an abandoned history, or that of a folder that was removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import stat
from pathlib import Path

import psutil

from mega_rl import disk
from mega_rl.disk import SaveError
from mega_rl.errors import UserError
from mega_rl.untrusted import read_file

SHM = Path("/dev/shm")
CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
HISTORY_FILE = ".memory"  # in the run's folder of checkpoints
HINT = "set checkpoint.memory.interval=0, or remove it"
_TOKEN = re.compile(r"[0-9a-f]{16}")


def user_folder(shm: Path) -> Path:
    """Return the folder of this user."""
    return shm / f"mega_rl-{os.geteuid()}"


def folder_of(shm: Path, run_dir: str, history: str) -> Path:
    """Return the folder of a run's history. run_dir: rank 0's real path."""
    return user_folder(shm) / f"{hashlib.sha256(os.fsencode(run_dir)).hexdigest()[:16]}-{history}"


def new_history() -> str:
    """Return a new token."""
    return secrets.token_hex(8)


def read_history(root: Path) -> str:
    """Return the token in a run's folder of checkpoints, "" without a valid one."""
    try:
        token = read_file(root / HISTORY_FILE, 1024).decode(errors="replace").strip()
    except UserError:
        return ""
    return token if _TOKEN.fullmatch(token) else ""


def write_history(root: Path, token: str) -> None:
    """Write the token into a run's folder of checkpoints; "" removes it. Raises SaveError."""
    if token:
        disk.replace_text(root / HISTORY_FILE, f"{token}\n")
    else:
        disk.remove_file(root / HISTORY_FILE)


def make(folder: Path) -> None:
    """Make a run's folder, only for this user. Raises SaveError for a foreign one."""
    for each in (folder.parent, folder):
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(each, 0o700)
        except OSError as error:
            raise SaveError(f"{each}: cannot be made ({error.strerror}); {HINT}") from error
        if why := unusable(folder):
            raise SaveError(f"{why}; {HINT}")


def unusable(folder: Path) -> str:
    """Return "PATH: reason" if the run folder may not be used; "" if usable or missing."""
    for each in (folder.parent, folder):
        if not os.path.lexists(each):
            return ""
        status = os.lstat(each)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            return f"{each}: is not a folder that only this user may enter"
    return ""


def remove(folder: Path) -> None:
    """Remove the folder of a run, and an empty user's folder. Raises SaveError."""
    disk.remove_tree(folder)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()


def remove_others(folder: Path) -> None:
    """Remove other histories of the same run than the one in `folder`. Raises SaveError."""
    if unusable(folder):
        return
    for other in folder.parent.glob(f"{folder.name.partition('-')[0]}-*"):
        if other != folder:
            remove(other)


def free_memory(folder: Path, *, cgroups: Path = CGROUPS, own: Path = OWN_CGROUP) -> tuple[int, str]:
    """Return the fewest free bytes of tmpfs, host and control groups, with its name.

    A control group kills a process that exceeds its limit, and a tmpfs counts in it. File cache does not: the kernel
    frees it first.
    """
    limits = [(disk.free_bytes(folder), f"the tmpfs of {folder}"), (psutil.virtual_memory().available, "the host")]
    group = cgroups / (own.read_text().partition("0::")[2].strip().strip("/") if own.exists() else "")
    for each in (group, *group.parents):
        with contextlib.suppress(OSError, ValueError):  # no limit
            limit, used = (int((each / name).read_text()) for name in ("memory.max", "memory.current"))
            stat = dict(map(str.split, (each / "memory.stat").read_text().splitlines()))
            used -= max(0, int(stat.get("file", 0)) - int(stat.get("shmem", 0)))
            limits.append((max(0, limit - used), "the container's memory limit"))
    return min(limits)
