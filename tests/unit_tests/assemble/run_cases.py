"""Whole runs on each rank of a launch, with what they sampled and what they printed."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch

from mega_rl.types import Rollout


class KeptRollouts:
    """Stands before a run's rollouts and keeps this rank's rows: token ids, length of the prompt, ended by a stop."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self.seen: list[list[tuple[list[int], int, bool]]] = []

    def metrics(self) -> dict[str, float]:
        """The source's."""
        return dict(self.source.metrics())

    def generate(self, prompts: Any, *, step: int, greedy: bool = False, draws: object = None) -> Rollout:
        """The source's rows."""
        rollout: Rollout = self.source.generate(prompts, step=step, greedy=greedy)
        columns = (rollout.tokens, rollout.lengths, rollout.prompt_lengths, rollout.finished)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        self.seen.append([(tokens[:length], prompt, finished) for tokens, length, prompt, finished in rows])
        return rollout


def run_all(rank: int, runs: dict[str, Sequence[str]]) -> dict[str, Any]:
    """By name, of runs with these settings: this rank's "rows" of every step, and what it "printed" as errors."""
    from mega_rl.accelerator import prepare

    accelerator = prepare("cpu")
    from mega_rl.assemble import build_trainer, session
    from mega_rl.plan.preflight import preflight

    torch.set_num_threads(1)
    actual = {}
    for name, settings in runs.items():
        config = preflight(None, settings)
        printed = io.StringIO()
        with contextlib.redirect_stderr(printed), session(config, accelerator) as groups, ExitStack() as resources:
            trainer = build_trainer(config, accelerator, groups, stop_requested=lambda: False, resources=resources)
            trainer.rollout = kept = KeptRollouts(trainer.rollout)
            trainer.fit()
        actual[name] = {"rows": kept.seen, "printed": printed.getvalue()}
    return actual
