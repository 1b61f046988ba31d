"""The actor as a Hugging Face checkpoint, now and then."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mega_rl.errors import RunError, UserError
from mega_rl.parallel.agreement import first_failure
from mega_rl.protocols import Ranks

log = logging.getLogger(__name__)


class Exporter(Protocol):
    """An engine that can write its weights in Hugging Face's format."""

    def save_hf(self, directory: Path, *, source: Path) -> None:
        """Write them, with config and tokenizer of `source`, whole or not at all; collective over its ranks."""
        ...


@dataclass(frozen=True)
class HfExports:
    """Writes `root/step_000010`; one that is there already, of a history that was left, is replaced."""

    engine: Exporter
    root: Path
    source: Path  # where the model came from
    ranks: Ranks  # all of them
    on_error: str  # of a checkpoint.on_error

    def __call__(self, done: int) -> None:
        """Write the weights after `done` steps; collective.

        Raises:
            RunError: on all ranks, when it failed and `on_error` is stop.
        """
        folder = self.root / f"step_{done:06d}"
        message = None
        try:
            self.engine.save_hf(folder, source=self.source)
        except (UserError, RunError, OSError) as error:
            message = str(error)
        message = first_failure(message, self.ranks)
        if message is None:
            return
        text = f"the Hugging Face checkpoint of step {done} failed: {message}"
        if self.on_error == "stop":
            raise RunError(text)
        if self.ranks.rank == 0:
            log.error("%s; training goes on", text)
