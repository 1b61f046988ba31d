"""Runs in one folder one after the other, in one process, with what each said in its log."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any


class Kept(logging.Handler):
    """Keeps "LEVEL message" of every record."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        self.lines.append(f"{record.levelname} {record.getMessage()}")


def run_all(rank: int, folder: str, runs: Sequence[Sequence[str]]) -> list[list[str]]:
    """Train with each of these settings in turn, from this folder; the log of each run, its error last."""
    from mega_rl.parallel.accelerator import prepare

    accelerator: Any = prepare("cpu")
    from mega_rl.errors import UserError
    from mega_rl.plan.preflight import preflight
    from mega_rl.trainer.assemble import build_trainer, session

    os.chdir(folder)
    said = []
    for settings in runs:
        kept = Kept()
        logger = logging.getLogger("mega_rl")
        logger.setLevel(logging.INFO)
        logger.addHandler(kept)
        try:
            config = preflight(None, settings)
            with session(config, accelerator) as groups, ExitStack() as resources:
                build_trainer(config, accelerator, groups, stop_requested=lambda: False, resources=resources).fit()
        except UserError as error:
            kept.lines.append(f"ERROR {error}")
        finally:
            logger.removeHandler(kept)
        said.append(kept.lines)
    return said
