"""Progress of a run as its launcher can see it: in its checkpoints, and in what its ranks record."""

from __future__ import annotations

import os
from pathlib import Path

from mega_rl.checkpoint.folders import CHECKPOINTS, complete, is_step_folder, step_of
from mega_rl.checkpoint.memory import place
from mega_rl.errors import UserError
from mega_rl.launcher.health import RankHealth


class RunProgress:
    """Steps that are done, and those of them that are saved, on disk or in the memory of this host."""

    def __init__(
        self, run_dir: Path | None, health: RankHealth, *, resume: str = "auto", shm: Path = place.SHM
    ) -> None:
        """run_dir: of the run, None for a program that has none. resume: its checkpoint.resume. shm: see `place`."""
        self._root = None if run_dir is None else run_dir / CHECKPOINTS
        self._health, self._resume, self._shm = health, resume, shm
        self._earlier = self._on_disk(), self._in_memory()
        named = Path(resume)
        self._first = self._newest() if resume == "auto" else step_of(named) if is_step_folder(named) else 0

    @property
    def is_saved(self) -> bool:
        """Return whether this launch has saved a checkpoint that is still there."""
        now = self._on_disk(), self._in_memory()
        return any(one not in ("", earlier) for one, earlier in zip(now, self._earlier, strict=True))

    @property
    def step(self) -> int:
        """Return the steps done: as ranks have recorded, else those of the newest checkpoint."""
        recorded = self._health.step()
        return recorded if recorded is not None else self._newest()

    @property
    def is_made(self) -> bool:
        """Return whether this launch has done a step, as far as known."""
        return self.is_saved or (self._health.step() or 0) > self._first

    @property
    def next_start(self) -> str:
        """Return in words where ranks go on that are started again now, as far as this host can see.

        One in memory that turns out to be damaged, or to lack the part of a lost host, sends them to the disk.
        """
        if not self.is_saved and self._resume != "auto":
            return "the beginning" if self._resume == "never" else f"checkpoint.resume={self._resume}"
        on_disk, in_memory = _step(self._on_disk()), _step(self._in_memory())
        if in_memory > on_disk:
            return f"the checkpoint of step {in_memory} in memory"
        return f"the checkpoint of step {on_disk} on disk" if on_disk >= 0 else "the beginning"

    def _newest(self) -> int:
        return max(_step(self._on_disk()), _step(self._in_memory()), 0)

    def _on_disk(self) -> str:
        return "" if self._root is None else _newest_in(self._root)

    def _in_memory(self) -> str:
        """Return what `_newest_in` does of this host's memory, where the run's present history lies."""
        history = "" if self._root is None else place.read_history(self._root)
        if self._root is None or not history:
            return ""
        folder = place.folder_of(self._shm, os.path.realpath(self._root.parent), history)
        return "" if place.unusable(folder) else _newest_in(folder)


def _newest_in(folder: Path) -> str:
    """Return name and time of the newest complete checkpoint, "" for none: one of the same step may replace it."""
    try:
        folders = complete(folder)
        return f"{folders[-1].name}@{folders[-1].stat().st_mtime_ns}" if folders else ""
    except (OSError, UserError):  # the ranks say what is wrong with the folder
        return ""


def _step(checkpoint: str) -> int:
    """Return the step of what `_newest_in` has returned, -1 of no checkpoint."""
    return step_of(Path(checkpoint.partition("@")[0])) if checkpoint else -1
