"""Runs whose order of prompts has a state, on each rank of a launch: what they draw, sample and end with."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from mega_rl.config.schema import Config
from mega_rl.config.schema.data import MixtureConfig
from tests.helpers.engines import exported, replaced
from tests.helpers.loops import watch_batches
from tests.unit_tests.distributed.test_layout_invariance import run_config

STEPS, SAVED = 4, 2


class Run(NamedTuple):
    """A run of STEPS steps that saves after SAVED, or one that goes on from there."""

    layout: str
    source: str = ""  # name of the run to resume from
    dynamic: bool = False
    kind: str = "success"  # or "stream", of a mixture of two
    forget: bool = False  # a planted fault: the checkpoint's rates are not restored


def config_of(folder: Path, name: str, run: Run) -> Config:
    """GRPO in steps of six prompts: of 24, those that are solved by epochs alone, or of streams in blocks of ten."""
    config = run_config(folder, run.layout, "grpo")
    if run.kind == "success":
        config = replaced(config, "data", train_files=[str(folder / "few.jsonl")])
        config = replaced(config, "data", curriculum={"name": "success", "explore": 0.2, "right_above": 0.5})
    else:
        sources = {
            "few": {"files": [str(folder / "few.jsonl")], "weight": 1.0},
            "many": {"files": [str(folder / f"many-{part}.parquet") for part in range(3)], "weight": 3.0},
        }
        config = replaced(config, "data", train_files=[], mixture=MixtureConfig(sources=sources))
        config = replaced(config, "data.stream", rows=10)
    config = replaced(config, "reward", function=f"{folder / 'hopeless.py'}:half_are_hopeless")
    if run.dynamic:
        config = replaced(config, "rollout.dynamic_sampling", max_generations=4, prompts=4)
    resume = str(folder / run.source / "checkpoints" / f"step_{SAVED:06d}") if run.source else "auto"
    interval = 0 if run.source else SAVED
    config = replaced(config, "checkpoint", save_interval=interval, save_final=False, resume=resume)
    sizes = {"steps": STEPS, "prompts_per_step": 6, "minibatch_size": 6}
    return replaced(config, "trainer", run_dir=str(folder / name), **sizes)


def on_ranks(rank: int, folder: str, runs: dict[str, Run]) -> dict[str, Any]:
    """By name of run: where it started, the prompts of each step, metrics of the data, the actor's weights."""
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("auto")
    return {name: one_run(Path(folder), name, run, accelerator) for name, run in runs.items()}


def one_run(folder: Path, name: str, run: Run, accelerator: Any) -> dict[str, Any]:
    from mega_rl.checkpoint.run_state import ORDER, RunState
    from mega_rl.trainer.assemble import build_trainer, session

    config, restorable = config_of(folder, name, run), RunState.restorable
    if run.forget:
        RunState.restorable = lambda self, numbers: {n: e for n, e in self.engines.items() if n != ORDER}  # type: ignore[method-assign]
    try:
        with session(config, accelerator) as groups, ExitStack() as resources:
            trainer = build_trainer(config, accelerator, groups, stop_requested=lambda: False, resources=resources)
            batches: list[list[str]] = []
            watch_batches(
                trainer,
                lambda batch: batches.append([f"{prompt.source} {prompt.text}" for prompt in batch.samples.prompts]),
            )
            trainer.fit()
            weights = exported(trainer.algorithm.actor.engine)  # type: ignore[attr-defined]
            return {"start": trainer.start, "batches": batches, "weights": weights}
    finally:
        RunState.restorable = restorable  # type: ignore[method-assign]
