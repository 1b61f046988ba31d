"""`mega-rl eval`: exit code 0 when every sample is scored, 1 when the evaluation cannot go on, 2 for mistakes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from mega_rl import progress
from mega_rl.cli.launch_options import LaunchOptions, become
from mega_rl.config.loader import load
from mega_rl.environment import variables_of
from mega_rl.errors import UserError


def evaluate(
    launch: LaunchOptions,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings, as engine.megatron.tp=2.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="Recipe whose model, layout, data and rewards are taken.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", metavar="HF_DIR", help="Checkpoint: model.path.")] = None,
    data: Annotated[
        list[str] | None,
        typer.Option("--data", metavar="[NAME=]FILE", help="Prompts, JSONL or Parquet; more than once for more sets."),
    ] = None,
    n: Annotated[int | None, typer.Option("--n", min=1, help="Samples of each prompt: validation.n.")] = None,
    k: Annotated[str | None, typer.Option("--k", metavar="K,...", help="Of pass@k and maj@k: validation.k.")] = None,
    reward: Annotated[str | None, typer.Option("--reward", help="Function that scores: reward.function.")] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", min=0.0, help="validation.temperature; 0 is greedy.")
    ] = None,
    top_p: Annotated[float | None, typer.Option("--top-p", help="validation.top_p.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option("--max-new-tokens", min=1, help="Longest response: rollout.max_new_tokens.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of samples and results.")] = Path(
        "runs/eval"
    ),
) -> None:
    """Sample a model's answers to sets of prompts and report pass@k, avg@k and maj@k with 95 % intervals."""
    given: dict[str, object] = {"model.path": model, "validation.n": n, "validation.k": None if k is None else f"[{k}]"}
    given |= {"reward.function": reward, "validation.temperature": temperature, "validation.top_p": top_p}
    given |= {"rollout.max_new_tokens": max_new_tokens}
    settings = [*(overrides or []), *(f"{key}={value}" for key, value in given.items() if value is not None)]
    settings += _sets(data or [])
    progress.show_progress()
    launch.check(os.environ)
    with progress.phase("checking the settings, model and data", announce=True):
        from mega_rl.config.evaluation import evaluation_config
        from mega_rl.preflight import check_run
        from mega_rl.preflight.launcher import launched_world_size

        world_size = launched_world_size() if launch.world_size is None else launch.world_size
        loaded = load(config, settings)
        if temperature == 0 and loaded.validation.n > 1:
            raise UserError(
                f"--temperature=0 with {loaded.validation.n} samples of each prompt: greedy ones are all the same; "
                "raise it, or set --n=1"
            )
        asked = evaluation_config(loaded, world_size=world_size, out=str(out))
        resolved = check_run(asked, world_size=world_size, launchers=launch.nnodes + launch.spares)
    if launch.needs_launcher:
        recipe = [] if config is None else ["--config", str(config)]
        program = ["mega_rl.cli", "eval", *recipe, "--out", str(out), *settings]
        started = launch.launch(program, run_dir="", resume="never")
        become(replace(started, max_restarts=launch.max_restarts or 0))
    with progress.importing("PyTorch and Megatron-Core", announce=True):
        from mega_rl.accelerator import prepare

        accelerator = prepare(
            resolved.trainer.device, variables=variables_of(resolved.engine, resolved.rollout, resolved.trainer)
        )
        from mega_rl.assemble.evaluation_run import evaluate as run
    results = run(resolved, accelerator)
    if os.environ.get("RANK", "0") == "0":
        progress.close()
        for line in _table(results["sets"]):
            typer.echo(line)
        typer.echo(f"samples: {out / 'samples.jsonl'}, results: {out / 'results.json'}")


def _sets(data: Sequence[str]) -> Iterator[str]:
    """Yield the settings of --data: named sets, and the files of the one without a name. Raises UserError."""
    unnamed = []
    for text in data:
        name, equals, file = text.partition("=")
        if not equals or not re.fullmatch(r"\w+", name):
            unnamed.append(text)
        elif not file:
            raise UserError(f"--data={text}: names no file; write NAME=FILE")
        else:
            yield f"validation.sets.{name}={file}"
    if unnamed:
        quoted = ", ".join("'" + file.replace("'", "''") + "'" for file in unnamed)
        yield f"data.val_files=[{quoted}]"


def _table(sets: dict[str, Any]) -> Iterator[str]:
    """Yield one line for each number of each set."""
    for name, one in sets.items():
        yield f"{name or 'data'}: {one['prompts']} prompts"
        for metric, mean in one["means"].items():
            yield f"  {metric:<24} {mean:.4f}"
        for metric, of in one["estimates"].items():
            yield f"  {metric:<24} {of['mean']:.4f}  [{of['low']:.4f}, {of['high']:.4f}]  over {of['prompts']} prompts"
