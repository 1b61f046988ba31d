"""Tasks of ranks: layouts to measure, runs to record, a recorded step to compute again. Imports Megatron-Core."""

from __future__ import annotations

import json
from pathlib import Path

from mega_rl.config.keys import with_settings
from mega_rl.config.schema import Config
from mega_rl.parallel.accelerator import Accelerator
from mega_rl.untrusted import read_record
from mega_rl.verify.measure import measure
from mega_rl.verify.plan import Plan, ReplayPlan
from mega_rl.verify.replay.task import replay
from mega_rl.verify.rl.record import record


def run_task(path: Path, accelerator: Accelerator) -> None:
    """Run the task in a file, {name: arguments}; collective."""
    ((name, arguments),) = json.loads(path.read_text(encoding="utf-8")).items()
    if name == "measure":
        measure(read_record(Plan, arguments), accelerator)
    elif name == "replay":
        replay(read_record(ReplayPlan, arguments), accelerator)
    else:
        for settings, folder in arguments:
            record(with_settings(Config(), settings), Path(folder), accelerator)
