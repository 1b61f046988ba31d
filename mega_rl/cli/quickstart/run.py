"""`mega-rl quickstart`: write data and a model, then launch a supervised warm start and the training."""

from __future__ import annotations

import json
import logging
import re
import shutil
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Annotated, Literal, NamedTuple

import typer

from mega_rl import environment
from mega_rl.cli.look import report
from mega_rl.cli.output import print_table
from mega_rl.cli.quickstart import programs, sums, word_problems
from mega_rl.cli.quickstart.inputs import write_fresh_model
from mega_rl.config.keys import value_of
from mega_rl.config.loader import load
from mega_rl.errors import RunError, UserError
from mega_rl.operations.launcher.launch import Launch
from mega_rl.operations.launcher.launch import launch as start_ranks
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.plan.preflight.host import refuse_tasks_of_srun
from mega_rl.tracking import progress
from mega_rl.tracking.metrics.records import read_metrics

log = logging.getLogger(__name__)

NUM_RANKS = 2
WARM_START_LR = 3e-3
INPUTS = ("data", "fresh_model", "model", "warm_start")  # written before the training, anew by each quickstart
EXPLAINED = "values/explained_variance"
LAST_STEPS = 10
_SHARES = r"val/(pass_at_\d+|maj_at_([2-9]|\d\d+)|reward_correct|reward_format)"  # validation's metrics that are shares
DEMONSTRATIONS = Path("data", "demonstrations.jsonl")  # a folder with this file belongs to an earlier quickstart


class QuickstartTask(NamedTuple):
    """A task of the quickstart."""

    recipe: str  # a packaged recipe, whose trainer.run_dir is runs/RECIPE
    inputs: ModuleType  # with write_data and TOKENS
    steps: int  # steps of the warm start
    batch_size: int

    def overrides(self, run_dir: Path, *, seed: int) -> list[str]:
        """Return the settings for a seed and a run folder as `key=value`."""
        config, moved = load(Path(self.recipe)), [setting("trainer.seed", seed)]
        for key in ("trainer.run_dir", "model.path", "data.train_files", "data.val_files", "reward.function"):
            value = value_of(config, key)
            texts = value if isinstance(value, list) else [value or ""]
            there = [text.replace(f"runs/{self.recipe}", str(run_dir), 1) for text in texts]
            if there != texts:
                moved.append(setting(key, there if isinstance(value, list) else there[0]))
        return moved

    def warm_start(self, run_dir: Path, *, seed: int, tp: int) -> list[str]:
        """Return the settings of the supervised part, which writes `warm_start/hf`; tp: of the recipe."""
        return [
            setting("trainer.run_dir", str(run_dir / "warm_start")),
            setting("model.path", str(run_dir / "fresh_model")),
            setting("data.train_files", [str(run_dir / DEMONSTRATIONS)]),
            *(f"trainer.{key}={value}" for key, value in (("seed", seed), ("steps", self.steps), ("timeout_s", 60))),
            *(f"trainer.{key}={self.batch_size}" for key in ("prompts_per_step", "minibatch_size")),
            *(f"engine.megatron.tp={tp}", "model.dtype=fp32", "data.answer_key=response"),
            *(f"data.max_prompt_tokens={self.inputs.TOKENS.max_positions - 1}", f"optim.lr={WARM_START_LR}"),
            *("optim.schedule=cosine", f"optim.warmup_steps={self.steps // 10}", "checkpoint.resume=never"),
            *("checkpoint.save_final=false", "checkpoint.hf_final=true"),
        ]


TASKS: Mapping[str, QuickstartTask] = {
    "sums": QuickstartTask("quickstart", sums, steps=400, batch_size=256),
    "gsm8k": QuickstartTask("quickstart_gsm8k", word_problems, steps=250, batch_size=128),
    "code": QuickstartTask("quickstart_code", programs, steps=250, batch_size=64),
}


def setting(key: str, value: str | int | list[str]) -> str:
    """Return `key=value`; any text, such as a path with a comma, is read back unchanged."""
    return f"{key}={json.dumps(value, ensure_ascii=False)}"


def quickstart(
    engine: Annotated[str, typer.Option(help="What PPO runs on: megatron (TP=2) or fsdp (two shards).")] = "megatron",
    seed: Annotated[int, typer.Option(help="Seed of data, model, order and sampling.", min=0)] = 0,
    run_dir: Annotated[
        Path | None,
        typer.Option(help="Folder of all files; default: runs/RECIPE. An earlier run in it is kept, in previous/."),
    ] = None,
    task: Annotated[
        Literal["sums", "gsm8k", "code"],
        typer.Option(help="sums: PPO; gsm8k: GRPO on word problems; code: GRPO on programs in a sandbox."),
    ] = "sums",
) -> None:
    """Train a tiny model in minutes on two cores: sums with PPO, word problems with GRPO."""
    environment.require_versions()
    chosen = TASKS[task]
    folder = run_dir or Path("runs", chosen.recipe)
    progress.show_progress()
    start = time.perf_counter()
    refuse_tasks_of_srun()
    # An earlier run in the folder is moved aside, not resumed.
    overrides = [setting("checkpoint.resume", "never"), *chosen.overrides(folder, seed=seed)]
    if engine != "megatron":
        overrides.append(setting("engine.backend", engine))
    config = load(Path(chosen.recipe), overrides)
    layout = ParallelLayout.of_engine(config.engine, world_size=NUM_RANKS, has_experts=False)
    prepare_folder(folder)
    with progress.phase(f"writing data and a fresh model to {folder}", announce=True):
        chosen.inputs.write_data(folder / "data", seed=seed)
        write_fresh_model(folder / "fresh_model", chosen.inputs.TOKENS, seed=seed)

    recipe_tp = load(Path(chosen.recipe)).engine.megatron.tp
    log.info("warm start: %d supervised steps on %d ranks", chosen.steps, NUM_RANKS)
    # The warm start is Megatron-Core's, so runs of both engines begin with the same weights.
    warm_start_s = launch(["sft", *chosen.warm_start(folder, seed=seed, tp=recipe_tp)], folder)
    shutil.move(folder / "warm_start" / "hf" / f"step_{chosen.steps:06d}", folder / "model")
    log.info("training on %d ranks", NUM_RANKS)
    train_s = launch(["train", "--config", chosen.recipe, *overrides], folder)
    seconds = {"train_s": train_s, "warm_start_s": warm_start_s, "total_s": time.perf_counter() - start}
    summarize(folder, layout=f"{engine} {layout}", seed=seed, **seconds)
    report([folder])


def prepare_folder(run_dir: Path) -> None:
    """Make the run's folder, or remove an earlier quickstart's inputs from it; its runs stay.

    Raises UserError when the folder holds other files or cannot be made.
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


def launch(command: list[str], run_dir: Path) -> float:
    """Run a command of `mega-rl` on NUM_RANKS ranks, on GPUs if possible; return its seconds.

    Raises RunError when it fails; it has shown why.
    """
    from mega_rl.parallel.accelerator.base import environment_of_ranks

    started = time.perf_counter()
    settings = Launch(("mega_rl.cli", *command), NUM_RANKS, run_dir=str(run_dir))
    code = start_ranks(settings, variables=environment_of_ranks(NUM_RANKS))
    if code == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    if code:
        raise RunError(f"mega-rl {command[0]} ended with exit code {code}; its messages stand above")
    return time.perf_counter() - started


def summarize(run_dir: Path, *, layout: str, seed: int, train_s: float, warm_start_s: float, total_s: float) -> None:
    """Read the run's metrics, write summary.json, and print what the training has changed."""
    records = list(read_metrics(run_dir / "metrics.jsonl"))
    validations = [record.metrics for record in records if "val/reward_correct" in record.metrics]
    first, last = validations[0], validations[-1]
    before, after = first["val/reward_correct"], last["val/reward_correct"]
    values = [record.metrics[EXPLAINED] for record in records if EXPLAINED in record.metrics][-LAST_STEPS:]
    explained = fmean(values) if values else None  # share of the returns' variance that the critic explains
    shares = {name: (first[name], last[name]) for name in sorted(last) if re.fullmatch(_SHARES, name)}
    summary = {
        **{"accuracy_before": before, "accuracy_after": after},  # share of right answers to held-out problems
        **{"explained_variance": explained, "train_s": train_s, "warm_start_s": warm_start_s, "total_s": total_s},
        **{"steps": records[-1].step, "layout": layout, "seed": seed, "validation": shares},  # before and after
    }
    (run_dir / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    rows = [
        (f"held-out {name.removeprefix('val/')}", f"{a:.1%} before, {b:.1%} after") for name, (a, b) in shares.items()
    ]
    if explained is not None:
        rows.append(("explained variance of the critic", f"{explained:.2f}"))
    rows.append(("steps", f"{records[-1].step} on {layout}"))
    rows.append(("time", f"warm start {warm_start_s:.0f} s, training {train_s:.0f} s"))
    print_table(("quickstart", ""), rows)
