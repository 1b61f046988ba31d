"""`mega-rl verify rl`: exit code 0 when both trainers agree, 1 when they do not, 2 for mistakes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from mega_rl import progress
from mega_rl.cli.text.lockstep import print_faults, print_json, print_json_faults, print_lockstep
from mega_rl.cli.verify import EXIT_DIFFERS, refuse_launcher
from mega_rl.errors import UserError
from mega_rl.verify.layouts import resolve_runs, stages_of
from mega_rl.verify.rl.inputs import STEPS, read_architecture, read_run, write_inputs
from mega_rl.verify.rl.phases import read_tolerances

log = logging.getLogger(__name__)

LAYOUTS = "1,tp2,pp2,dp2,fsdp2"


def rl(
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE] [KEY=VALUE]...",
            help="Recipe (a YAML file, or the name of a packaged one) and settings that replace its own.",
        ),
    ] = None,
    names: Annotated[
        str, typer.Option("--layouts", metavar="NAMES", help="Layouts, as tp2+sp,pp2, fsdp2; 1 is one rank.")
    ] = LAYOUTS,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Trainer steps; two updates each.")] = STEPS,
    self_check: Annotated[
        bool, typer.Option("--self-check", help="Plant faults into the independent trainer: each must be named.")
    ] = False,
    tolerance: Annotated[
        str, typer.Option("--tolerance", metavar="PHASE=NUMBER,...", help="As gradient=1e-4,log-probs=1e-3.")
    ] = "",
    timeout_s: Annotated[float, typer.Option("--timeout", min=1, help="Seconds that one run may take.")] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Follow a real run of a small model in lockstep with an independent trainer, and compare every update.

    The independent trainer, transformers' model under plain torch, gets the sampled tokens, the rewards and the weights
    at the start, and nothing else. The recipe's algorithm and optimizer count; its model is shrunk.
    """
    progress.show_progress()
    refuse_launcher()
    if self_check:
        _self_check(settings or [], timeout_s=timeout_s, as_json=as_json)
        return
    allowed = read_tolerances(tolerance)
    recipe, overrides = _split(settings or [])
    run = read_run(recipe, overrides, steps=steps)
    layouts = resolve_runs(names, read_architecture(run))
    log.info("verifying %s", recipe or "the default algorithm")
    with progress.importing("PyTorch"):
        from mega_rl.verify.rl.run import follow_layouts
        from mega_rl.verify.run import working_folder

    results = []
    with working_folder() as folder:
        with progress.phase("making the model"):
            config, small = write_inputs(run, Path(folder), multiple=stages_of(layouts))
        resolve_runs(names, small)
        header = {"recipe": recipe or "", "model": run.description, "steps": config.trainer.steps}
        for name, value in {} if as_json else header.items():
            typer.echo(f"{name}: {value}")
        for lockstep in follow_layouts(config, layouts, Path(folder), timeout_s=timeout_s, tolerances=allowed):
            results.append(lockstep)
            if not as_json:
                print_lockstep(lockstep, tolerances=allowed)
    if as_json:
        print_json(results, header=header, tolerances=allowed)
    if not all(lockstep.good for lockstep in results):
        raise typer.Exit(EXIT_DIFFERS)


def _self_check(settings: list[str], *, timeout_s: float, as_json: bool) -> None:
    """Print what a lockstep says of each planted fault; ends with exit code 1 where one is not named."""
    if settings:
        raise UserError(f"{settings[0]}: --self-check has runs of its own; leave recipe and settings out")
    with progress.importing("PyTorch"):
        from mega_rl.verify.rl.run import self_check
        from mega_rl.verify.run import working_folder

    with working_folder() as folder:
        results = list(self_check(Path(folder), timeout_s=timeout_s))
    (print_json_faults if as_json else print_faults)(results)
    if not all(result.good for result in results):
        raise typer.Exit(EXIT_DIFFERS)


def _split(settings: list[str]) -> tuple[str | None, list[str]]:
    """Return (recipe, overrides) of the arguments. Raises UserError for a second recipe."""
    recipes = [text for text in settings if "=" not in text and not text.startswith("~")]
    if len(recipes) > 1:
        raise UserError(f"{recipes[1]}: is no KEY=VALUE, and {recipes[0]} is the recipe already; name one recipe")
    return (recipes[0] if recipes else None), [text for text in settings if text not in recipes]
