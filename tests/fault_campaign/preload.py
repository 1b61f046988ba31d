"""Imports of launchers and ranks, which are forked from the process that imports this."""

from __future__ import annotations

import importlib
import threading

import tests.helpers.preloaded

for name in (
    "mega_rl.cli.app",
    "mega_rl.operations.launcher.ranks",
    "mega_rl.operations.launcher.store",
    "mega_rl.tracking.health.records",
    "mega_rl.engines.fsdp.engine",
    "mega_rl.plan.preflight",
    "torch.distributed.run",
    "datasets",
    "tensorboard.summary.writer.record_writer",
    "torch.utils.tensorboard",
):
    importlib.import_module(name)
assert tests.helpers.preloaded.threading.active_count() == 1, threading.enumerate()
