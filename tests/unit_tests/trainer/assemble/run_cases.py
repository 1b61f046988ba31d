"""Whole runs on each rank of a launch, with what they sampled and what they printed."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch

from mega_rl.types import Rollout
from tests.helpers.loops import watch_source


def rows_of(rollout: Rollout) -> list[tuple[list[int], int, bool]]:
    """Return (token ids, length of the prompt, ended by a stop token) of each row."""
    columns = (rollout.tokens, rollout.lengths, rollout.prompt_lengths, rollout.finished)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [(tokens[:length], prompt, finished) for tokens, length, prompt, finished in rows]


def run_all(rank: int, runs: dict[str, Sequence[str]]) -> dict[str, Any]:
    """By name, of runs with these settings: this rank's "rows" of every step, and what it "printed" as errors."""
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("cpu")
    from mega_rl.plan.preflight import preflight
    from mega_rl.trainer.assemble import build_trainer, session

    torch.set_num_threads(1)
    actual = {}
    for name, settings in runs.items():
        (config,) = preflight([None], settings)
        printed = io.StringIO()
        with contextlib.redirect_stderr(printed), session(config, accelerator) as groups, ExitStack() as resources:
            trainer = build_trainer(config, accelerator, groups, stop_requested=lambda: False, resources=resources)
            rows: list[list[tuple[list[int], int, bool]]] = []
            watch_source(trainer, lambda rollout, rows=rows: rows.append(rows_of(rollout)))  # type: ignore[misc]
            trainer.fit()
        actual[name] = {"rows": rows, "printed": printed.getvalue()}
    return actual
