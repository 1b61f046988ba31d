"""Checkpoints of a run: one folder per step, complete or ignored."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mega_rl.errors import UserError
from mega_rl.protocols import Engine, Ranks

log = logging.getLogger(__name__)

STEP_FOLDER = re.compile(r"step_\d+")
STATE_FILE = "trainer.json"  # written last: its presence says that the folder is complete


@dataclass
class DistCheckpointStore:
    """Engines through Megatron-Core's distributed checkpoints, the trainer's state as JSON.

    `root/step_000010/` holds a folder per engine and `trainer.json`. A save goes to `root/.step_000010.tmp`, which is
    renamed when every rank is done, so a torn save never looks like a checkpoint. `resume` is auto, never or a path.
    """

    root: Path
    engines: Mapping[str, Engine]
    ranks: Ranks  # all ranks
    keep: int
    resume: str
    identity: Mapping[str, Any]  # what must agree for a resume to make sense (seed, data fingerprint, ...)

    def save(self, step: int, state: Mapping[str, Any]) -> Path:
        """Write everything under `root/step_{step}`; collective. Returns the folder."""
        final, temporary = self.root / f"step_{step:06d}", self.root / f".step_{step:06d}.tmp"
        if self.ranks.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        self._wait()
        for name, engine in self.engines.items():
            engine.save(temporary / name)
        self._wait()
        if self.ranks.rank == 0:
            record = {"step": step, "identity": dict(self.identity), "state": dict(state)}
            with open(temporary / STATE_FILE, "w") as file:
                json.dump(record, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            shutil.rmtree(final, ignore_errors=True)
            temporary.rename(final)
            log.info("saved %s", final)
            self._tidy(step)
        self._wait()
        return final

    def _tidy(self, step: int) -> None:
        """Remove all but the newest `keep` checkpoints, and what torn saves have left.

        Checkpoints of later steps are of a history that this run has left by resuming before them; kept, they would be
        taken for the newest.
        """
        complete = complete_checkpoints(self.root)
        abandoned = [folder for folder in complete if step_of(folder) > step]
        for folder in abandoned:
            log.warning("removing %s: this run went back before it", folder)
        old = [folder for folder in complete if step_of(folder) <= step][: -self.keep]
        for folder in (*abandoned, *old, *self.root.glob(".step_*.tmp")):
            shutil.rmtree(folder)

    def restore(self) -> dict[str, Any] | None:
        """{"step", "state"} of the checkpoint to resume from, with the engines loaded; None to start afresh.

        Raises:
            UserError: the checkpoint asked for is damaged or not complete, or is of a run with another identity.
        """
        folder = self._to_resume()
        if folder is None:
            return None
        record = _read_record(folder / STATE_FILE)
        differing = [key for key, value in self.identity.items() if record["identity"].get(key) != value]
        if differing:
            changes = ", ".join(f"{k}: {record['identity'].get(k)!r} -> {self.identity[k]!r}" for k in differing)
            raise UserError(
                f"checkpoint {folder} is of another run ({changes}); "
                "set checkpoint.resume=never or another trainer.run_dir"
            )
        missing = [name for name in self.engines if not (folder / name).is_dir()]
        if missing:
            raise UserError(
                f"checkpoint {folder} has no {' and no '.join(missing)}; it is of a run with other models, or damaged: "
                "set checkpoint.resume=never or to another checkpoint"
            )
        for name, engine in self.engines.items():
            engine.load(folder / name)
        return record

    def _to_resume(self) -> Path | None:
        if self.resume == "never":
            return None
        if self.resume == "auto":
            complete = complete_checkpoints(self.root)
            return complete[-1] if complete else None
        folder = Path(self.resume)
        if not (folder / STATE_FILE).is_file():
            raise UserError(f"checkpoint.resume={self.resume}: no complete checkpoint there ({STATE_FILE} is missing)")
        return folder

    def _wait(self) -> None:
        """Until all ranks are here."""
        self.ranks.sum(torch.zeros(1))


def complete_checkpoints(root: Path) -> list[Path]:
    """Complete checkpoint folders under `root`, oldest first."""
    if not root.is_dir():
        return []
    folders = [f for f in root.iterdir() if STEP_FOLDER.fullmatch(f.name) and (f / STATE_FILE).is_file()]
    return sorted(folders, key=step_of)


def step_of(folder: Path) -> int:
    """Steps done when this checkpoint was saved."""
    return int(folder.name.removeprefix("step_"))


def _read_record(path: Path) -> dict[str, Any]:
    """The content of a checkpoint's trainer.json. Raises UserError."""
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(record["step"], int):
            raise TypeError("step is no number")
        if not (isinstance(record["identity"], dict) and isinstance(record["state"], dict)):
            raise TypeError("identity or state is no object")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"checkpoint file {path} is damaged ({error!r}); remove that folder or set checkpoint.resume=never"
        ) from error
    return record
