"""`mega-rl verify rl`: exit code 0 when both trainers agree, 1 when they do not, 2 for mistakes."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from mega_rl import progress
from mega_rl.cli.text.lockstep import print_faults, print_json, print_json_faults, print_lockstep
from mega_rl.cli.verify import EXIT_DIFFERS, app, refuse_launcher
from mega_rl.errors import UserError
from mega_rl.verify.rl.inputs import STEPS, read_run
from mega_rl.verify.rl.phases import read_tolerances

log = logging.getLogger(__name__)

LAYOUTS = "1,tp2,pp2,dp2,fsdp2"


@app.command("rl")
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

    The independent trainer, transformers' model under plain torch, gets the sampled tokens and the weights at the
    start, and computes the rest, the rewards too. The recipe's algorithm and optimizer count; its model is shrunk.
    """
    progress.show_progress()
    refuse_launcher()
    allowed = read_tolerances(tolerance)
    recipe, overrides = _split(settings or [])
    if self_check and settings:
        raise UserError(f"{settings[0]}: --self-check has runs of its own; leave recipe and settings out")
    run = read_run(recipe, overrides, steps=steps)
    with progress.importing("PyTorch"):
        from mega_rl.verify.rl import run as lockstep
    with lockstep.working_folder() as folder:
        if self_check:
            faults = list(lockstep.self_check(Path(folder), timeout_s=timeout_s))
            (print_json_faults if as_json else print_faults)(faults)
            _end(fault.good for fault in faults)
            return
        log.info("verifying %s", recipe or "the default algorithm")
        config, layouts = lockstep.prepare_run(run, names, Path(folder))
        header = {"recipe": recipe or "none", "model": run.description, "steps": steps}
        for name, value in {} if as_json else header.items():
            typer.echo(f"{name}: {value}")
        results = []
        for result in lockstep.follow_layouts(config, layouts, Path(folder), timeout_s=timeout_s, tolerances=allowed):
            results.append(result)
            if not as_json:
                print_lockstep(result, tolerances=allowed)
    if as_json:
        print_json(results, header=header, tolerances=allowed)
    _end(result.good for result in results)


def _end(good: Iterable[bool]) -> None:
    """End with exit code 1 unless all is good."""
    if not all(good):
        raise typer.Exit(EXIT_DIFFERS)


def _split(settings: list[str]) -> tuple[str | None, list[str]]:
    """Return (recipe, overrides) of the arguments. Raises UserError for a second recipe."""
    recipes = [text for text in settings if "=" not in text and not text.startswith("~")]
    if len(recipes) > 1:
        raise UserError(f"{recipes[1]}: is no KEY=VALUE, and {recipes[0]} is the recipe already; name one recipe")
    return (recipes[0] if recipes else None), [text for text in settings if text not in recipes]
