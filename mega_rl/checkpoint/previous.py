"""Files of an earlier run in a run folder, moved aside as a whole when another history begins there. No torch.

    previous/001/           what the first of the runs has left: checkpoints/, metrics.jsonl, config.yaml, ...
    previous/.002.moving/   a move in progress, or one that was cut short; the next holder of the lock undoes it

Only renames are made, so no file is copied or removed, and at every moment each file is in one of the two places.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from mega_rl.checkpoint.folders import LATEST_FILE, entries, is_step_folder, step_of
from mega_rl.errors import UserError
from mega_rl.storage import disk
from mega_rl.storage.disk import SaveError

log = logging.getLogger(__name__)

PREVIOUS, CHECKPOINTS, CONFIG_FILE = "previous", "checkpoints", "config.yaml"
# What a run writes into its folder, beside checkpoints. Logs of servers are not among it: they may be open already.
RECORDS = (
    *("curves.png", "hf", "metrics.jsonl", "records", "rollouts", "summary.json", "tensorboard"),
    *("mlruns", "swanlog", "trackers", "wandb"),
)
_NUMBER = re.compile(r"([0-9]{3,9})")
_MOVING = re.compile(r"\.([0-9]{3,9})\.moving")
# These stay in the checkpoint folder: the lock, the token of checkpoints in memory, and what a torn save has left,
# which the next save removes.
_STAYS = re.compile(r"\.lock|\.memory|\.step_[0-9]{6,12}\.tmp")
_MAX_STEPS_NAMED = 8


def begin_history(run_dir: Path, restored: Path | None, *, step_in_memory: int | None = None) -> None:
    """Move aside what a run folder holds of another history than the one that goes on from checkpoint `restored`.

    Where that is one of the folder's own, or one that the run has in memory, only later checkpoints are; else all that
    an earlier run has written. Logs one line that says so. The caller holds the run's lock. Raises UserError.
    """
    root = run_dir.absolute() / CHECKPOINTS
    own = restored is not None and restored.resolve().parent == root.resolve()
    files = earlier_files(run_dir)
    if own or step_in_memory is not None:
        step = step_in_memory if restored is None else step_of(restored)
        files = [f for f in files if is_step_folder(f) and step_of(f) > step]  # type: ignore[operator]
    if not files:
        return
    target = move_aside(run_dir, files)
    if own:
        disk.replace_text(root / LATEST_FILE, f"{restored.name}\n")  # type: ignore[union-attr]
    log.warning("%s held files of an earlier run (%s): moved to %s", run_dir, _in_words(files), target)


def previous_runs(run_dir: Path) -> list[Path]:
    """Folders of the runs that were moved aside, oldest first."""
    return sorted((p for p in entries(run_dir / PREVIOUS) if _NUMBER.fullmatch(p.name)), key=lambda p: int(p.name))


def earlier_files(run_dir: Path) -> list[Path]:
    """Return the files of an earlier run in its folder, relative to it; empty where nothing is worth keeping.

    A lone config.yaml is of a run that has not made a step.
    """
    checkpoints = [CHECKPOINTS / Path(p.name) for p in entries(run_dir / CHECKPOINTS) if not _STAYS.fullmatch(p.name)]
    records = [Path(name) for name in RECORDS if _holds_something(run_dir / name)]
    if not checkpoints and not records:
        return []
    config = [Path(CONFIG_FILE)] if os.path.lexists(run_dir / CONFIG_FILE) else []
    return [*checkpoints, *config, *records]


def move_aside(run_dir: Path, files: Sequence[Path]) -> Path:
    """Move these files of a run folder to a new folder under `previous`, all or none; returns it.

    `files` are relative to `run_dir`. The caller holds the run's lock.

    Raises:
        UserError: a file cannot be moved, for it is on another disk or the folder is not writable.
    """
    _check_one_disk(run_dir, files)
    numbers = [int(m[1]) for p in entries(run_dir / PREVIOUS) if (m := _NUMBER.search(p.name))]
    target = run_dir / PREVIOUS / f"{max(numbers, default=0) + 1:03d}"
    work = target.with_name(f".{target.name}.moving")
    try:
        disk.make_folder(work)
        _rename_all(run_dir, work, files)
        disk.rename(work, target)
        disk.sync_folder(target.parent)
    except SaveError as error:
        undo_moves(run_dir)
        raise UserError(
            f"trainer.run_dir={run_dir}: an earlier run's files cannot be moved to {target} ({error}); "
            "choose another trainer.run_dir"
        ) from error
    return target


def undo_moves(run_dir: Path) -> None:
    """Put files back that a move has taken before it was cut short. Raises SaveError."""
    for work in entries(run_dir / PREVIOUS):
        match = _MOVING.fullmatch(work.name)
        if not match:
            continue
        moved = [Path(p.name) for p in entries(work) if p.name != CHECKPOINTS]
        moved += [CHECKPOINTS / Path(p.name) for p in entries(work / CHECKPOINTS)]
        back = [file for file in moved if not os.path.lexists(run_dir / file)]
        _rename_all(work, run_dir, back)
        if len(back) == len(moved):
            disk.remove_tree(work)
        else:  # another program has written in between: both are kept
            disk.rename(work, work.with_name(match[1]))
        disk.sync_folder(work.parent)


def _in_words(files: Sequence[Path]) -> str:
    """ "checkpoints of steps 8, 9; config.yaml, metrics.jsonl"."""
    steps = sorted(step_of(file) for file in files if is_step_folder(file))
    shown = ", ".join(map(str, steps[-_MAX_STEPS_NAMED:]))
    more = "... " if len(steps) > _MAX_STEPS_NAMED else ""
    words = [f"checkpoints of steps {more}{shown}"] if steps else []
    others = [file.name for file in files if file.parent.name != CHECKPOINTS]
    return "; ".join([*words, *([", ".join(others)] if others else [])])


def _rename_all(source: Path, target: Path, files: Iterable[Path]) -> None:
    """Rename files of one folder into another, durably. Raises SaveError."""
    folders = set()
    for file in files:
        disk.make_folder((target / file).parent)
        disk.rename(source / file, target / file)
        folders |= {(source / file).parent, (target / file).parent}
    for folder in folders:
        disk.sync_folder(folder)


def _check_one_disk(run_dir: Path, files: Sequence[Path]) -> None:
    """Raises UserError for a folder of files that is on another disk than the run folder, as one behind a link."""
    here = run_dir.stat().st_dev
    for folder in {(run_dir / file).parent for file in files}:
        if folder.stat().st_dev != here:
            raise UserError(
                f"trainer.run_dir={run_dir}: {folder} holds an earlier run and is on another disk, so it cannot be "
                "moved aside; move it yourself or choose another trainer.run_dir"
            )


def _holds_something(path: Path) -> bool:
    """Return whether a file or folder is there and not empty."""
    if path.is_dir():
        return any(entries(path))
    return os.path.lexists(path) and path.lstat().st_size > 0
