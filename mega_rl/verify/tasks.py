"""Tasks of the ranks that a verification starts: layouts to measure, or runs to record. Imports Megatron-Core."""

from __future__ import annotations

import json
from pathlib import Path

from mega_rl.accelerator import Accelerator
from mega_rl.config.keys import with_settings
from mega_rl.config.schema import Config
from mega_rl.verify.measure import measure
from mega_rl.verify.plan import RUNS, Plan
from mega_rl.verify.rl.record import record


def run_task(path: Path, accelerator: Accelerator) -> None:
    """Run the task in a file: a `Plan`, or {"runs": [{"settings": {key: value}, "folder": path}]}; collective."""
    raw = json.loads(path.read_text(encoding="utf-8"))
    if RUNS not in raw:
        measure(Plan.read(path), accelerator)
        return
    for run in raw[RUNS]:
        record(with_settings(Config(), run["settings"]), Path(run["folder"]), accelerator)
