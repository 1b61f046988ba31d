"""One rank of the real run: `python -m mega_rl.verify.rl.rank PLAN`, started by `mega_rl.verify.launcher`.

PLAN is a JSON file with a list of runs of one world size: {"settings": {key: value}, "folder": path}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mega_rl.config.keys import with_settings
from mega_rl.config.schema import Config
from mega_rl.verify.rank import run_rank

if TYPE_CHECKING:
    from mega_rl.accelerator import Accelerator


def main(path: str) -> int:
    """Record the runs of the plan at `path`; returns the exit code."""
    plan = json.loads(Path(path).read_text(encoding="utf-8"))

    def work(accelerator: Accelerator) -> None:
        from mega_rl.verify.rl.record import record  # imports Megatron-Core

        for run in plan:
            record(with_settings(Config(), run["settings"]), Path(run["folder"]), accelerator)

    return run_rank(work, phase=Path(path).with_name("phase"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
