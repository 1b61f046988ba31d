"""The quickstart: data, a fresh model, a supervised warm start and PPO, each in its own launch, and a table."""

from __future__ import annotations

import json
import logging
import shutil
import signal
import time
from pathlib import Path

from mega_rl.config.loader import load
from mega_rl.environment import variables_of
from mega_rl.errors import RunError, UserError
from mega_rl.launcher.launch import Launch
from mega_rl.launcher.launch import launch as start_ranks
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.plan.preflight.host import refuse_tasks_of_srun
from mega_rl.quickstart import WARM_START
from mega_rl.quickstart.tasks import setting, task_named
from mega_rl.tracking import progress
from mega_rl.tracking.progress.terminal import show_progress

log = logging.getLogger(__name__)

PROGRAM = "mega_rl.cli"
NUM_RANKS = 2
INPUTS = ("data", "fresh_model", "model")  # folders that are written before PPO, and anew by the next quickstart
DEMONSTRATIONS = Path("data", "demonstrations.jsonl")  # a folder that holds this file is an earlier quickstart's


def quickstart(*, engine: str, seed: int, run_dir: Path, task: str = "sums") -> None:
    """Train a tiny model on a task and print the outcome; everything is written below `run_dir`.

    The warm start is Megatron-Core's whatever the engine, so runs of both engines begin with the same weights.

    Raises:
        UserError: no such engine or task, or `run_dir` holds something else than an earlier quickstart.
        RunError: a training ended with an error, which it has shown.
    """
    show_progress()
    start = time.perf_counter()
    refuse_tasks_of_srun()
    chosen_task = task_named(task)
    overrides = [
        setting("trainer.run_dir", str(run_dir)),
        setting("trainer.seed", seed),
        setting("checkpoint.resume", "never"),  # an earlier run in the folder is moved aside, not gone on with
        setting("model.path", str(run_dir / "model")),
        *chosen_task.settings(run_dir),
    ]
    if engine != "megatron":
        overrides.append(setting("engine.backend", engine))
    chosen = load(chosen_task.recipe, overrides).engine
    layout = ParallelLayout.of_engine(chosen, world_size=NUM_RANKS, has_experts=False)
    prepare_folder(run_dir)
    with progress.phase(f"writing data and a fresh model to {run_dir}", announce=True):
        chosen_task.write(run_dir, seed)

    log.info("warm start: %d supervised steps on %d ranks", chosen_task.warm.steps, NUM_RANKS)
    started = time.perf_counter()
    launch([WARM_START, "--run-dir", str(run_dir), "--seed", str(seed), "--task", task])
    warm_start_s = time.perf_counter() - started

    log.info("training on %d ranks", NUM_RANKS)
    started = time.perf_counter()
    launch(["train", "--config", str(chosen_task.recipe), *overrides])
    train_s = time.perf_counter() - started
    with progress.phase("drawing the curves"):
        from mega_rl.quickstart.report import print_table, summarize

        summary, plot = summarize(
            run_dir,
            layout=f"{engine} {layout}",
            seed=seed,
            train_s=train_s,
            warm_start_s=warm_start_s,
            total_s=time.perf_counter() - start,
        )
    print_table(summary, plot=plot)


def warm_start(*, seed: int, run_dir: Path, task: str) -> None:
    """Run one rank of the supervised warm start: reads `run_dir`'s fresh model and data, writes its `model`."""
    chosen_task, model = task_named(task), run_dir / "fresh_model"
    settings = [setting("trainer.seed", seed), setting("model.path", str(model)), *chosen_task.settings(run_dir)]
    config = load(chosen_task.recipe, settings)
    show_progress()
    with progress.importing("PyTorch and Megatron-Core", announce=True):
        from mega_rl.accelerator import prepare

        accelerator = prepare(
            config.trainer.device, variables=variables_of(config.engine, config.rollout, config.trainer)
        )
        from transformers import AutoTokenizer

        from mega_rl.quickstart import warm_start as supervised  # imports Megatron-Core

    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    end = tokenizer.eos_token_id
    rows = [json.loads(line) for line in (run_dir / DEMONSTRATIONS).read_text(encoding="utf-8").splitlines()]
    supervised.warm_start(
        config,
        accelerator,
        [(tokenizer.encode(row["prompt"]), [*tokenizer.encode(row["response"]), end]) for row in rows],
        output=run_dir / "model",
        steps=chosen_task.warm.steps,
        batch_size=chosen_task.warm.batch_size,
        lr=chosen_task.warm.lr,
    )


def prepare_folder(run_dir: Path) -> None:
    """Make the run's folder, or remove the inputs of an earlier quickstart from it; its runs stay.

    Raises:
        UserError: the folder holds something else, or cannot be made.
    """
    try:
        if run_dir.exists() and any(run_dir.iterdir()) and not (run_dir / DEMONSTRATIONS).is_file():
            raise UserError(
                f"--run-dir={run_dir}: holds files that no quickstart wrote; give another folder or empty it"
            )
        for name in INPUTS:
            shutil.rmtree(run_dir / name, ignore_errors=True)
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--run-dir={run_dir}: cannot be made: {error.strerror}; give another folder") from None


def launch(command: list[str]) -> None:
    """Run a command of `mega-rl` on NUM_RANKS ranks of this machine; its output goes where ours goes.

    The ranks run on the CPU unless there is a GPU for each.

    Raises:
        RunError: it failed.
    """
    from mega_rl.accelerator.gpus import environment_of_ranks

    code = start_ranks(Launch((PROGRAM, *command), NUM_RANKS), variables=environment_of_ranks(NUM_RANKS))
    if code == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    if code:
        raise RunError(f"mega-rl {command[0]} ended with exit code {code}; its messages stand above")
