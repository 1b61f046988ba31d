"""`mega-rl quickstart`, and the command that it starts on every rank of its warm start."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mega_rl import versions
from mega_rl.cli.help import Commands
from mega_rl.quickstart import WARM_START, run

app = Commands()

Seed = Annotated[int, typer.Option("--seed", help="Seed of data, model, order and sampling.", min=0)]
RunDir = Annotated[
    Path,
    typer.Option("--run-dir", help="Folder of everything that is written; an earlier run in it is kept, in previous/."),
]


@app.command()
def quickstart(
    engine: Annotated[
        str, typer.Option("--engine", help="What PPO runs on: megatron (TP=2) or fsdp (two shards).")
    ] = "megatron",
    seed: Seed = 0,
    run_dir: RunDir = Path("runs/quickstart"),
) -> None:
    """Train a tiny model to add with PPO on two ranks, in a few minutes on two cores."""
    versions.require()
    run.quickstart(engine=engine, seed=seed, run_dir=run_dir)


@app.command(WARM_START, hidden=True)
def warm_start(seed: Seed, run_dir: RunDir) -> None:
    """Run one rank of the quickstart's supervised warm start."""
    run.warm_start(seed=seed, run_dir=run_dir)
