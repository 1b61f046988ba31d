"""`mega-rl eval`: exit code 0 when every sample is scored, 1 when the evaluation cannot go on, 2 for mistakes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from mega_rl.cli.evaluation.options import EvaluationOptions
from mega_rl.cli.launch_options import LaunchOptions, become
from mega_rl.cli.layout_options import with_options
from mega_rl.config.loader import load
from mega_rl.errors import UserError
from mega_rl.health.interruption import StoppedBySignal
from mega_rl.tracking import progress


@with_options
def evaluate(
    launch: LaunchOptions,
    options: EvaluationOptions,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings, as engine.megatron.tp=2.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="Recipe whose model, layout, data and rewards are taken.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of samples and results.")] = Path(
        "runs/eval"
    ),
) -> None:
    """Sample a model's answers to sets of prompts and report pass@k, avg@k and maj@k with 95 % intervals."""
    settings = [*(overrides or []), *options.settings()]
    progress.show_progress()
    launch.check(os.environ)
    with progress.phase("checking the settings, model and data", announce=True):
        from mega_rl.plan.preflight.evaluation import checked

        loaded = load(config, settings)
        if options.temperature == 0 and loaded.validation.n > 1:
            raise UserError(
                f"--temperature=0 with {loaded.validation.n} samples of each prompt: greedy ones are all the same; "
                "raise it, or set --n=1"
            )
        launchers = launch.nnodes + launch.spares
        resolved = checked(loaded, world_size=launch.world_size, out=str(out), launchers=launchers)
    if launch.needs_launcher:
        recipe = [] if config is None else ["--config", str(config)]
        program = ["mega_rl.cli", "eval", *recipe, "--out", str(out), *settings]
        started = launch.launch(program, run_dir=str(out), resume="never")
        become(replace(started, max_restarts=launch.max_restarts or 0))
    with progress.importing("PyTorch and Megatron-Core", announce=True):
        from mega_rl.cli.evaluation.run import run
    try:
        results = run(resolved)
    except StoppedBySignal as stop:
        raise typer.Exit(stop.exit_code) from stop
    if os.environ.get("RANK", "0") == "0":
        progress.close()
        sets = results["sets"]
        assert isinstance(sets, dict), "of evaluation_run"
        for line in _table(sets):
            typer.echo(line)
        if results["right_when"]:
            typer.echo(f"right: {results['right_when']}")
        typer.echo(f"samples: {out / 'samples.jsonl'}, results: {out / 'results.json'}")


def _table(sets: dict[str, Any]) -> Iterator[str]:
    """Yield one line for each number of each set."""
    for name, one in sets.items():
        yield f"{name or 'data'}: {one['prompts']} prompts"
        for metric, mean in one["means"].items():
            yield f"  {metric:<24} {mean:.4f}"
        for metric, of in one["estimates"].items():
            yield f"  {metric:<24} {of['mean']:.4f}  [{of['low']:.4f}, {of['high']:.4f}]  over {of['prompts']} prompts"
