"""`python -m mega_rl.quickstart`: data, a fresh model, a supervised warm start, PPO under torchrun, and a table."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from mega_rl.cli import configure_logging, run_app
from mega_rl.config.loader import load
from mega_rl.errors import RunError, UserError
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.quickstart import task
from mega_rl.quickstart.report import summarize

RECIPE = Path("recipes/quickstart.yaml")
NUM_RANKS = 2
WARM_STEPS = 400
WARM_BATCH = 256
WARM_LR = 3e-3
MARKER = "data"  # a folder that holds this one is an earlier quickstart's, and may be replaced

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def quickstart(
    seed: Annotated[int, typer.Option(help="Seed of data, model, order and sampling.", min=0)] = 0,
    run_dir: Annotated[Path, typer.Option(help="Folder of everything that is written; replaced.")] = Path(
        "runs/quickstart"
    ),
    engine: Annotated[str, typer.Option(help="What PPO runs on: megatron (TP=2) or fsdp (two shards).")] = "megatron",
) -> None:
    """Train a tiny model to add with PPO on two ranks, in a few minutes on two cores.

    The warm start is Megatron-Core's whatever the engine, so runs of both engines begin with the same weights.
    """
    start = time.perf_counter()
    overrides = [
        f"trainer.run_dir={run_dir}",
        f"trainer.seed={seed}",
        f"model.path={run_dir / 'model'}",
        f"data.train_files=[{run_dir / 'data' / 'train.jsonl'}]",
        f"data.val_files=[{run_dir / 'data' / 'held_out.jsonl'}]",
    ]
    if engine != "megatron":
        overrides += [f"engine={engine}", "parallel.tp=1"]
    parallel = load(RECIPE, overrides).parallel
    layout = ParallelLayout(world_size=NUM_RANKS, tp=parallel.tp, pp=parallel.pp)
    prepare_folder(run_dir)
    task.write_dataset(run_dir / "data", task.make_task(seed))
    task.write_checkpoint(run_dir / "fresh_model", seed=seed)

    started = time.perf_counter()
    launch(["mega_rl.quickstart", "warm-start", "--run-dir", str(run_dir), "--seed", str(seed)])
    warm_start_s = time.perf_counter() - started

    started = time.perf_counter()
    launch(["mega_rl.cli", "train", "--config", str(RECIPE), *overrides])
    train_s = time.perf_counter() - started
    summarize(
        run_dir,
        layout=f"{engine} {layout}",
        seed=seed,
        train_s=train_s,
        warm_start_s=warm_start_s,
        total_s=time.perf_counter() - start,
    )


@app.command(hidden=True)
def warm_start(
    seed: Annotated[int, typer.Option()],
    run_dir: Annotated[Path, typer.Option()],
) -> None:
    """One rank of the supervised warm start; started by `quickstart`."""
    config = load(RECIPE, [f"trainer.seed={seed}", f"model.path={run_dir / 'fresh_model'}"])
    configure_logging()
    from mega_rl.accelerator import prepare

    accelerator = prepare(config.trainer.device)
    from mega_rl.quickstart import warm_start as supervised  # after prepare: it brings Megatron-Core in

    tokenizer = task.build_tokenizer()
    end = tokenizer.eos_token_id
    rows = [json.loads(line) for line in (run_dir / "data" / "demonstrations.jsonl").read_text().splitlines()]
    supervised.warm_start(
        config,
        accelerator,
        [(tokenizer.encode(row["prompt"]), [*tokenizer.encode(row["response"]), end]) for row in rows],
        output=run_dir / "model",
        steps=WARM_STEPS,
        batch_size=WARM_BATCH,
        lr=WARM_LR,
    )


def prepare_folder(run_dir: Path) -> None:
    """Make the run's folder, in place of an earlier quickstart's.

    Raises:
        UserError: the folder holds something else.
    """
    if run_dir.exists() and any(run_dir.iterdir()) and not (run_dir / MARKER).is_dir():
        raise UserError(f"--run-dir={run_dir}: holds files that no quickstart wrote; give another folder or empty it")
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir(parents=True)


def launch(program: list[str]) -> None:
    """Run a module with its arguments on NUM_RANKS ranks of this machine; its output goes where ours goes.

    Raises:
        RunError: it failed.
    """
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    command = [sys.executable, "-m", "mega_rl.launch", str(NUM_RANKS), *program]
    code = subprocess.run(command, env=environment, check=False).returncode
    if code:
        raise RunError(f"{' '.join(program[:2])} ended with exit code {code}; its messages stand above")


if __name__ == "__main__":
    sys.exit(run_app(app, sys.argv[1:] or ["quickstart"], prog_name="python -m mega_rl.quickstart"))
