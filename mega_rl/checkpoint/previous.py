"""Files of an earlier run in a run folder, moved aside when another history begins there.

    previous/001/           files of the first run: checkpoints/, metrics.jsonl, config.yaml, ...

Files are only renamed, oldest checkpoints first, so each is in one of the two places if the process is killed. The next
history that begins in the folder moves the rest.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

from mega_rl import disk
from mega_rl.checkpoint.folders import CHECKPOINTS, LATEST_FILE, entries, is_step_folder, step_of
from mega_rl.disk import SaveError
from mega_rl.errors import UserError

log = logging.getLogger(__name__)

PREVIOUS, CONFIG_FILE = "previous", "config.yaml"
# Files that a run writes next to its checkpoints, except logs of servers, which may be open already.
RECORDS = (
    *("curves.png", "hf", "metrics.jsonl", "records", "rollouts", "summary.json", "tensorboard"),
    *("mlruns", "swanlog", "trackers", "wandb"),
)
_NUMBER = re.compile(r"([0-9]{3,9})")
# The lock, the token of checkpoints in memory, and the remains of a torn save, which the next save removes.
_STAYS = re.compile(r"\.lock|\.memory|\.step_[0-9]{6,12}\.tmp")


def begin_history(run_dir: Path, restored: Path | None, *, step_in_memory: int | None = None) -> None:
    """Move aside the files of another history than the one that continues from checkpoint `restored`.

    If that is a checkpoint of this folder, or in the run's memory, moves only later checkpoints; else all files of an
    earlier run. Logs one line. The caller holds the run's lock.

    Raises:
        UserError: a file cannot be moved.
    """
    root = run_dir.absolute() / CHECKPOINTS
    own = restored if restored is not None and restored.resolve().parent == root.resolve() else None
    files = earlier_files(run_dir)
    if own is not None or step_in_memory is not None:
        step = step_of(own) if own is not None else step_in_memory
        files = [file for file in files if is_step_folder(file) and step_of(file) > (step or 0)]
    if not files:
        return
    last = max((int(path.name) for path in previous_runs(run_dir)), default=0)
    target = run_dir / PREVIOUS / f"{last + 1:03d}"
    try:
        for file in files:
            disk.make_folder((target / file).parent)
            disk.rename(run_dir / file, target / file)
        for folder in {path.parent for file in files for path in (run_dir / file, target / file)}:
            disk.sync_folder(folder)
        if own is not None:
            disk.replace_text(root / LATEST_FILE, f"{own.name}\n")
    except SaveError as error:
        raise UserError(
            f"trainer.run_dir={run_dir}: an earlier run's files cannot be moved to {target} ({error}); "
            "choose another trainer.run_dir"
        ) from error
    steps = ", ".join(str(step_of(file)) for file in files if is_step_folder(file))
    others = ", ".join(file.name for file in files if file.parent.name != CHECKPOINTS)
    words = "; ".join(filter(None, [f"checkpoints of steps {steps}" if steps else "", others]))
    log.warning("%s held files of an earlier run (%s): moved to %s", run_dir, words, target)


def previous_runs(run_dir: Path) -> list[Path]:
    """Return the folders of the runs that were moved aside, oldest first."""
    return sorted((p for p in entries(run_dir / PREVIOUS) if _NUMBER.fullmatch(p.name)), key=lambda p: int(p.name))


def earlier_files(run_dir: Path) -> list[Path]:
    """Return an earlier run's files relative to its folder; none if it has only config.yaml."""
    checkpoints = [CHECKPOINTS / Path(p.name) for p in entries(run_dir / CHECKPOINTS) if not _STAYS.fullmatch(p.name)]
    records = [Path(name) for name in RECORDS if _holds_something(run_dir / name)]
    if not checkpoints and not records:
        return []
    config = [Path(CONFIG_FILE)] if os.path.lexists(run_dir / CONFIG_FILE) else []
    checkpoints.sort(key=lambda path: step_of(path) if is_step_folder(path) else -1)
    return [*checkpoints, *config, *records]


def _holds_something(path: Path) -> bool:
    """Return whether a file or folder exists and is not empty."""
    if path.is_dir():
        return any(entries(path))
    return os.path.lexists(path) and path.lstat().st_size > 0
