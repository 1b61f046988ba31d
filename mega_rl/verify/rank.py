"""One rank of a verification: `python -m mega_rl.verify.rank TASK`, started by `mega_rl.verify.launcher`."""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from importlib import import_module
from pathlib import Path

from mega_rl.errors import UserError
from mega_rl.parallel.accelerator import prepare
from mega_rl.tracking import progress


class _PhaseFile:
    """Writes the phases in progress to a file, which the command shows on its terminal."""

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
    """Run the task in a file, {module: arguments}; returns the exit code, 2 for a user's mistake."""
    logging.basicConfig(level=logging.WARNING)
    warnings.simplefilter("ignore")
    task = Path(path)
    if os.environ.get("RANK", "0") == "0":
        progress.listen(_PhaseFile(task.with_suffix(".phase")))
    try:
        with progress.importing("PyTorch and Megatron-Core"):
            accelerator = prepare("auto")
            ((name, arguments),) = json.loads(task.read_text(encoding="utf-8")).items()
            module = import_module(f"mega_rl.verify.{name}")  # imports Megatron-Core
        module.run_task(arguments, accelerator)
    except UserError as error:
        sys.stderr.write("error: " + " ".join(str(error).split("\n")) + "\n")
        return UserError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
