"""Imports shared by ranks on a CPU: the process they are forked from imports this module once.

torch, Megatron-Core and what is built on them take three seconds of a core to import, hundreds of times in all tests.
Imports alone: no thread and no process group may be there when a rank is forked.
"""

from __future__ import annotations

import gc
import importlib
import threading

gc.disable()

import torch  # noqa: E402

from mega_rl.parallel.accelerator import prepare  # noqa: E402

torch.set_num_threads(1)
prepare("cpu")
for name in (
    "mega_rl.trainer.assemble",
    "mega_rl.engines.build",
    "mega_rl.engines.megatron",
    "mega_rl.verify",
    "transformers.models.qwen3.modeling_qwen3",  # which transformers imports with the first model
):
    importlib.import_module(name)  # after `prepare`

# Upstream's checkpoint writers: releases before 0.18 fork one for each file, later ones have none beside the rank.
importlib.import_module("tests.helpers.upstream_writers").write_in_ranks()

assert threading.active_count() == 1, threading.enumerate()

# Half a million objects of the imports, which stay: a rank's own collections pass over them (0.3 s each otherwise).
gc.collect()
gc.freeze()
gc.enable()
