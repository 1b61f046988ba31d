"""One rank of a verification: `python -m mega_rl.verify.rank PLAN`, started by `mega_rl.verify.launcher`."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mega_rl import progress
from mega_rl.errors import UserError
from mega_rl.verify.plan import Plan

if TYPE_CHECKING:
    from mega_rl.accelerator import Accelerator


class _PhaseFile:
    """Writer of the phases in progress to a file that the command reads: its terminal is not this process's."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def changed(self, phases: tuple[progress.Phase, ...]) -> None:
        """Replace the text atomically: a reader gets the previous text or this one."""
        if phases:
            part = self._path.with_suffix(".part")
            part.write_text(": ".join(phase.name for phase in phases), encoding="utf-8")
            part.rename(self._path)

    def close(self) -> None:
        """Do nothing: the last text stays."""


def main(path: str) -> int:
    """Measure the layouts of the plan at `path`; returns the exit code, 2 where a model cannot be cut so."""
    plan = Plan.read(Path(path))

    def work(accelerator: Accelerator) -> None:
        from mega_rl.verify.measure import measure  # imports Megatron-Core

        measure(plan, accelerator)

    return run_rank(work, phase=plan.phase)


def run_rank(work: Callable[[Accelerator], None], *, phase: Path) -> int:
    """Prepare this rank and do its work; returns the exit code, 2 for a UserError. Rank 0 writes phases to `phase`."""
    logging.basicConfig(level=logging.WARNING)
    warnings.simplefilter("ignore")
    if os.environ.get("RANK", "0") == "0":
        progress.listen(_PhaseFile(phase))
    try:
        with progress.importing("PyTorch and Megatron-Core"):
            from mega_rl.accelerator import prepare

            accelerator = prepare("auto")
        work(accelerator)
    except UserError as error:
        sys.stderr.write("error: " + " ".join(str(error).split("\n")) + "\n")
        return UserError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
