"""Progress of a run as its launcher can see it: in its checkpoints, and in what its ranks record."""

from __future__ import annotations

from pathlib import Path

from mega_rl.checkpoint.folders import complete, is_step_folder, step_of
from mega_rl.checkpoint.previous import CHECKPOINTS
from mega_rl.errors import UserError
from mega_rl.launcher.health import RankHealth


class RunProgress:
    """Steps that are done, and those of them that are saved."""

    def __init__(self, run_dir: Path | None, health: RankHealth, *, resume: str = "auto") -> None:
        """run_dir: of the run, None for a program that has none. resume: its checkpoint.resume."""
        self._root = None if run_dir is None else run_dir / CHECKPOINTS
        self._health = health
        self._earlier = self._newest()
        name = {"auto": self._earlier.partition("@")[0], "never": ""}.get(resume, Path(resume).name)
        self._first = step_of(Path(name)) if is_step_folder(Path(name)) else 0  # where the ranks begin

    @property
    def saved(self) -> str:
        """Return the name of the newest checkpoint if this launch has saved it, else an empty text."""
        newest = self._newest()
        return newest.partition("@")[0] if newest != self._earlier else ""

    @property
    def step(self) -> int:
        """Return the steps done: as ranks have recorded, else those of the newest checkpoint."""
        recorded = self._health.step()
        name = self._newest().partition("@")[0]
        return recorded if recorded is not None else step_of(Path(name)) if name else 0

    @property
    def is_made(self) -> bool:
        """Return whether this launch has done a step, as far as known."""
        return bool(self.saved) or (self._health.step() or 0) > self._first

    def _newest(self) -> str:
        """Return name and time of the newest complete checkpoint: one of the same step may replace it."""
        if self._root is None:
            return ""
        try:
            folders = complete(self._root)
            return f"{folders[-1].name}@{folders[-1].stat().st_mtime_ns}" if folders else ""
        except (OSError, UserError):  # the ranks say what is wrong with the folder
            return ""
