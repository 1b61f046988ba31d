"""`mega-rl quickstart`, and the command that it starts on every rank of its warm start."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mega_rl import versions
from mega_rl.cli.show.report import report
from mega_rl.quickstart import run
from mega_rl.quickstart.tasks import task_named

Seed = Annotated[int, typer.Option("--seed", help="Seed of data, model, order and sampling.", min=0)]
RunDir = Annotated[
    Path | None,
    typer.Option(
        "--run-dir",
        help="Folder of everything that is written, by default runs/quickstart or runs/quickstart_TASK; an earlier "
        "run in it is kept, in previous/.",
    ),
]
Task = Annotated[
    str,
    typer.Option(
        "--task",
        help="sums: PPO on additions; gsm8k: GRPO on word problems in the shape of GSM8K; code: GRPO on "
        "programs that are run in a sandbox.",
    ),
]


def quickstart(
    engine: Annotated[
        str, typer.Option("--engine", help="What PPO runs on: megatron (TP=2) or fsdp (two shards).")
    ] = "megatron",
    seed: Seed = 0,
    run_dir: RunDir = None,
    task: Task = "sums",
) -> None:
    """Train a tiny model to add with PPO, or on word problems with GRPO, in a few minutes on two cores."""
    versions.require()
    run_dir = run_dir or task_named(task).run_dir
    run.quickstart(engine=engine, seed=seed, run_dir=run_dir, task=task)
    report([run_dir])


def warm_start(seed: Seed, run_dir: RunDir, task: Task = "sums") -> None:
    """Run one rank of the quickstart's supervised warm start."""
    run.warm_start(seed=seed, run_dir=run_dir or task_named(task).run_dir, task=task)
