"""Tasks of ranks: layouts to measure, runs to record, a recorded step to compute again. Imports Megatron-Core."""

from __future__ import annotations

import json
from pathlib import Path

from mega_rl.config.keys import with_settings
from mega_rl.config.schema import Config
from mega_rl.parallel.accelerator import Accelerator
from mega_rl.verify.measure import measure
from mega_rl.verify.plan import REPLAY, RUNS, Plan
from mega_rl.verify.replay.plan import ReplayPlan
from mega_rl.verify.replay.task import replay
from mega_rl.verify.rl.record import record


def run_task(path: Path, accelerator: Accelerator) -> None:
    """Run the task in a file; collective.

    That is a `Plan`, a `ReplayPlan`, or {"runs": [{"settings": {key: value}, "folder": path}]}.
    """
    raw = json.loads(path.read_text(encoding="utf-8"))
    if REPLAY in raw:
        replay(ReplayPlan.read(path), accelerator)
        return
    if RUNS not in raw:
        measure(Plan.read(path), accelerator)
        return
    for run in raw[RUNS]:
        record(with_settings(Config(), run["settings"]), Path(run["folder"]), accelerator)
