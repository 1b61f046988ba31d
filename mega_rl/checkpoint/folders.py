"""Folders of checkpoints: listing complete ones, publication, retention, removal, and the lock of a run's folder.

A save works under a hidden name and renames it when all of it is on the disk, so `step_000010` is complete or was
damaged later. Removal renames a folder to a hidden name before its first file goes. At every moment a reader finds the
same complete checkpoints, or one more.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import socket
import stat
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from mega_rl import disk
from mega_rl.checkpoint.format.manifest import (
    COMMIT_FILE,
    MANIFEST_FILE,
    MAX_COMMIT_BYTES,
    MAX_MANIFEST_BYTES,
    Manifest,
    check_commit,
    commit_text,
    manifest_text,
    now,
    parse_manifest,
)
from mega_rl.errors import UserError
from mega_rl.untrusted import decode_json, read_file, shorten

log = logging.getLogger(__name__)

CHECKPOINTS, PREVIOUS = "checkpoints", "previous"  # folders of a run folder
# Files that a run writes next to its checkpoints, except logs of servers, which may be open already.
RECORDS = (
    *("config.yaml", "hf", "metrics.jsonl", "records", "rollouts", "summary.json", "tensorboard"),
    *("mlruns", "swanlog", "trackers", "wandb"),
)
LATEST_FILE = "latest"
LOCK_FILE = ".lock"
_STEP = re.compile(r"step_([0-9]{6}|[1-9][0-9]{6,11})")
_HIDDEN = re.compile(r"\.(step_[0-9]{6,12})\.(tmp|old|removed)")
_HIDDEN_REASONS = {
    "tmp": "a pending or interrupted save",
    "old": "was being replaced by a later save of its step",
    "removed": "was being removed",
}


def final(root: Path, step: int) -> Path:
    """Return the folder of the checkpoint after `step` steps."""
    return root / f"step_{step:06d}"


def temporary(root: Path, step: int) -> Path:
    """Return the hidden folder in which a save works."""
    return _hidden(final(root, step), "tmp")


def step_of(folder: Path) -> int:
    """Return the number of steps in a checkpoint's name."""
    return int(folder.name.removeprefix("step_"))


def is_step_folder(path: Path) -> bool:
    """Return whether a path has the name of a checkpoint."""
    return _STEP.fullmatch(path.name) is not None


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint, checked against COMMIT. Raises UserError or UserErrors."""
    return parse_manifest(_committed(folder), folder / MANIFEST_FILE)


def complete(root: Path) -> list[Path]:
    """Return the folders of complete checkpoints, oldest first: COMMIT fits the manifest; shards are not checked."""
    return _survey(root)[0]


def torn(root: Path) -> list[tuple[Path, str]]:
    """Return (path, reason) of incomplete checkpoints."""
    return _survey(root)[1]


def damaged(root: Path) -> list[tuple[Path, str]]:
    """Return the entries of `torn` that are newest and were damaged after their save.

    An interrupted save never looks like this, so the user must agree before a run ignores them.
    """
    whole, others = _survey(root)
    newest = step_of(whole[-1]) if whole else -1
    return [(path, why) for path, why in others if is_step_folder(path) and step_of(path) > newest and _faults(path)]


def begin(root: Path, step: int) -> Path:
    """Return an empty folder to save in; remove the remains of interrupted saves."""
    disk.make_folder(root)
    for path in entries(root):
        if (match := _HIDDEN.fullmatch(path.name)) and match[2] == "tmp":
            disk.remove_tree(path)
    folder = temporary(root, step)
    disk.make_folder(folder)
    return folder


def publish(root: Path, manifest: Manifest) -> Path:
    """Publish the shards in the temporary folder of a step as a checkpoint; return its folder.

    Replaces an earlier checkpoint of that step. Raises SaveError.
    """
    work, target = temporary(root, manifest.step), final(root, manifest.step)
    text = manifest_text(manifest)
    disk.write_text(work / MANIFEST_FILE, text)
    disk.write_text(work / COMMIT_FILE, commit_text(text.encode()))
    disk.sync_folder(work)
    before = _hidden(target, "old")
    if os.path.lexists(target):
        disk.remove_tree(before)
        disk.rename(target, before)
    disk.rename(work, target)
    disk.sync_folder(root)
    disk.replace_text(root / LATEST_FILE, f"{target.name}\n")
    disk.remove_tree(before)
    return target


def recover(root: Path) -> None:
    """Restore the name of a checkpoint whose replacement a kill has interrupted."""
    for path in entries(root):
        match = _HIDDEN.fullmatch(path.name)
        if match and match[2] == "old" and not os.path.lexists(root / match[1]) and not _faults(path):
            disk.rename(path, root / match[1])
            disk.sync_folder(root)


def surplus(root: Path, *, newest_step: int, keep: int, keep_interval: int, keep_best: str) -> list[tuple[Path, str]]:
    """Return (folder, reason) of checkpoints to remove now that `newest_step` is the run's newest.

    Keeps the newest `keep`, those whose step is a multiple of `keep_interval` (0: none), and the one with the largest
    value of the metric `keep_best` ("": none). When the newest one lacks shards, keeps all.
    """
    whole, others = _survey(root)
    newest = final(root, newest_step)
    if newest not in whole or size_faults(newest):
        log.warning("%s is not complete: no other checkpoint is removed", newest)
        return []
    kept = {newest, *whole[max(0, len(whole) - keep) :]}
    kept |= {folder for folder in whole if keep_interval > 0 and step_of(folder) % keep_interval == 0}
    values = []
    for folder in whole:
        with suppress(UserError, KeyError):
            values.append((read_manifest(folder).metrics[keep_best], step_of(folder), folder))
    kept |= {max(values)[2]} if values else set()  # the later one of equal values
    remains = [(folder, why) for folder, why in others if folder.is_dir() and not folder.is_symlink()]
    return [*remains, *((folder, "older than those to keep") for folder in whole if folder not in kept)]


def begin_history(run_dir: Path, restored: Path | None, *, step_in_memory: int | None = None) -> None:
    """Move to `previous/001` the files of another history than the one that continues from checkpoint `restored`.

    If that is a checkpoint of this folder, or in the run's memory, moves only later checkpoints; else all files of an
    earlier run. Oldest checkpoints first, so the newest is in one of the two places if the process is killed. The
    caller holds the run's lock. Raises SaveError.
    """
    root = run_dir.absolute() / CHECKPOINTS
    own = restored is not None and restored.resolve().parent == root.resolve()
    first = step_of(restored) if restored is not None and own else -1 if step_in_memory is None else step_in_memory
    steps = sorted(filter(is_step_folder, entries(root)), key=step_of)
    files = [path for path in steps if step_of(path) > first]
    if first < 0:
        records = [run_dir / name for name in RECORDS if _holds_something(run_dir / name)]
        files += records if files or any(record.name != "config.yaml" for record in records) else []
    if not files:
        return
    target = run_dir / PREVIOUS / f"{1 + len(entries(run_dir / PREVIOUS)):03d}"
    for file in files:
        moved = target / file.absolute().relative_to(run_dir.absolute())
        disk.make_folder(moved.parent)
        disk.rename(file, moved)
    disk.sync_folder(root)
    disk.sync_folder(run_dir)
    if restored is not None and own:
        disk.replace_text(root / LATEST_FILE, f"{restored.name}\n")
    words = ", ".join(file.name for file in files)
    log.warning("%s held files of an earlier run (%s): moved to %s", run_dir, words, target)


def _holds_something(path: Path) -> bool:
    """Return whether a file or folder exists and is not empty."""
    return any(entries(path)) if path.is_dir() else path.is_file() and path.stat().st_size > 0


def remove(folders: Sequence[Path]) -> None:
    """Remove checkpoints; a kill in between leaves each complete or under a hidden name. Raises SaveError."""
    for folder in folders:
        if not is_step_folder(folder):
            disk.remove_tree(folder)
    visible = [folder for folder in folders if is_step_folder(folder)]
    for folder in visible:
        disk.remove_tree(_hidden(folder, "removed"))
        disk.rename(folder, _hidden(folder, "removed"))
    for root in {folder.parent for folder in visible}:
        disk.sync_folder(root)
    for folder in visible:
        disk.remove_tree(_hidden(folder, "removed"))


def size_faults(folder: Path) -> list[str]:
    """Return a problem for each shard that is missing or of another size."""
    problems = []
    try:
        shards = read_manifest(folder).shards
    except UserError as error:
        return [str(error)]
    for shard in shards:
        try:
            status = os.lstat(folder / shard.file)
        except OSError as error:
            problems.append(f"{folder / shard.file}: {error.strerror}")
            continue
        if not stat.S_ISREG(status.st_mode) or status.st_size != shard.nbytes:
            problems.append(f"{folder / shard.file}: {status.st_size} bytes, expected a file of {shard.nbytes}")
    return problems


def _survey(root: Path) -> tuple[list[Path], list[tuple[Path, str]]]:
    """Return (folders of complete checkpoints, oldest first; path and reason of all others)."""
    whole: list[Path] = []
    others: list[tuple[Path, str]] = []
    for path in entries(root):
        hidden = _HIDDEN.fullmatch(path.name)
        why = _HIDDEN_REASONS[hidden[2]] if hidden else _faults(path) if is_step_folder(path) else ""
        if why:
            others.append((path, why))
        elif is_step_folder(path):
            whole.append(path)
    return sorted(whole, key=step_of), others


def _faults(folder: Path) -> str:
    """Return why a folder is not a complete checkpoint, "" if it is."""
    if folder.is_symlink() or not folder.is_dir():
        return "is not a folder; name another place by checkpoint.resume"
    if not os.path.lexists(folder / COMMIT_FILE):
        return f"has no {COMMIT_FILE}: an interrupted save, or damaged"
    try:
        _committed(folder)
    except UserError as error:
        return str(error)
    return ""


def _committed(folder: Path) -> bytes:
    """Return the bytes of the manifest, checked against COMMIT."""
    commit = read_file(folder / COMMIT_FILE, MAX_COMMIT_BYTES)
    manifest = read_file(folder / MANIFEST_FILE, MAX_MANIFEST_BYTES)
    check_commit(commit, manifest, folder)
    return manifest


def entries(root: Path) -> list[Path]:
    """Return the paths in a folder by name, maybe none. Raises UserError."""
    try:
        return sorted(root.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{root}: cannot be read ({error.strerror}); choose another trainer.run_dir") from error


def _hidden(folder: Path, kind: str) -> Path:
    return folder.with_name(f".{folder.name}.{kind}")


class RunLock:
    """Lock on writing under `root`, which is made if missing; a context manager.

    The kernel frees it with the process, however that ends; a lock file left behind does no harm. Raises UserError
    when another process holds it: "`what`: another run (host, pid, since) writes checkpoints there; `fix`".
    """

    def __init__(self, root: Path, *, what: str = "", fix: str = "choose another trainer.run_dir") -> None:
        self.path = root / LOCK_FILE
        self._what, self._fix = what or f"trainer.run_dir={root.parent}", fix
        self._fd: int | None = None
        self._made: list[Path] = []  # folders that did not exist before
        # A forked child would hold the lock for as long as it lives, so it closes its descriptor.
        own = weakref.WeakMethod(self._close)
        os.register_at_fork(after_in_child=lambda: (close := own()) and close())

    def __enter__(self) -> RunLock:
        self.take()
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def take(self) -> None:
        """Take the lock, and complete renames that a kill interrupted. Raises UserError."""
        assert self._fd is None, f"{self.path} is taken twice"
        root = self.path.parent
        self._made = [folder for folder in (root, root.parent) if not folder.exists()]
        try:
            while self._fd is None:
                disk.make_folder(root)
                with suppress(FileNotFoundError):  # the previous holder removed the folder as well
                    self._fd = disk.lock_file(self.path)
            os.ftruncate(self._fd, 0)
        except BlockingIOError as error:
            raise UserError(
                f"{self._what}: another run{self._holder()} writes checkpoints there; {self._fix}"
            ) from error
        except OSError as error:
            self._close()
            reason = "not a regular file" if error.errno in (errno.EINVAL, errno.ELOOP) else error.strerror
            raise UserError(f"{self._what}: {self.path} cannot be locked ({reason}); {self._fix}") from error
        record = {"host": socket.gethostname(), "pid": os.getpid(), "since": now()}
        disk.write_at(self._fd, 0, [memoryview(json.dumps(record).encode())])
        recover(root)

    def release(self) -> None:
        """Free the lock, and remove folders that `take` made and that are empty.

        Ignores a disk that fails: the error of an earlier write is the cause of the run's end.
        """
        with suppress(OSError, UserError):
            if self._fd is not None:
                os.ftruncate(self._fd, 0)
            if self._made and [entry.name for entry in entries(self.path.parent)] == [LOCK_FILE]:
                self.path.unlink()
                for folder in self._made:
                    folder.rmdir()  # raises OSError for a folder that is not empty, which stays
        self._made = []
        self._close()

    def _close(self) -> None:
        with suppress(OSError):  # close reports writes that failed, and closes the file anyway
            if self._fd is not None:
                os.close(self._fd)
        self._fd = None

    def _holder(self) -> str:
        """Return the holder's host, process and start, as far as the file says."""
        try:
            raw = decode_json(read_file(self.path, 4096), self.path)
        except UserError:
            return ""
        host, pid, since = (shorten(str(raw.get(key, "unknown"))) for key in ("host", "pid", "since"))
        return f" (host {host}, pid {pid}, since {since})"
