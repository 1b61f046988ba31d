"""`mega-rl report`, `audit`, `doctor`, `recipes` and `plan`: runs as a page, this machine, recipes."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from mega_rl import disk
from mega_rl.cli.options import Json, Overrides, Recipe
from mega_rl.cli.output import Commands, plain, show
from mega_rl.config import packaged
from mega_rl.errors import UserError
from mega_rl.operations.diagnosis import overview
from mega_rl.plan import report as planned
from mega_rl.tracking import progress
from mega_rl.tracking.report.content import AUDIT, page_of, read_runs


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run folders; seeds of one run become a band.")],
    out: Annotated[Path | None, typer.Option(help="Page to write; else report.html in the first run.")] = None,
) -> None:
    """Write curves, warnings, times, settings and samples of runs as one self-contained HTML file."""
    page = out or runs[0] / "report.html"
    if page.suffix != ".html":
        raise UserError(f"--out={page}: must end in .html")
    progress.show_progress()
    with progress.phase("reading runs"):
        text = page_of(read_runs(runs))
    disk.make_folder(page.parent)
    disk.replace_text(page, text)
    typer.echo(str(page))


def audit(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run with metrics.records.interval=1.")],
    versions: Annotated[
        int, typer.Option(min=0, metavar="N", help="Most versions of the weights under which log-probs are computed.")
    ] = 4,
    as_json: Json = False,
) -> None:
    """Prove from a run's records that each prompt and token trained once and in time.

    The page is also written to RUN/audit.json, which `mega-rl report` shows.
    """
    progress.show_progress()
    with progress.importing("PyTorch"):
        from mega_rl.verify.audit import lines_of
        from mega_rl.verify.audit_run import audit_run
    with tempfile.TemporaryDirectory(prefix="audit_") as work:
        outcome = audit_run(run, Path(work), versions=versions)
    page, content = lines_of(outcome, str(run)), plain({**asdict(outcome), "good": not outcome.breaches})
    disk.replace_text(run / AUDIT, json.dumps({**content, "page": page}, indent=1) + "\n")
    show(content, page, as_json=as_json)
    raise typer.Exit(1 if outcome.breaches else 0)


def doctor(
    run: Annotated[
        Path | None, typer.Option(help="Folder of a run: show its ranks while it lives, else its newest report.")
    ] = None,
    stacks: Annotated[bool, typer.Option("--stacks", help="With --run: stacks of the ranks on this machine.")] = False,
    require: Annotated[
        str | None,
        typer.Option(metavar="NAME,...", help="Instead fail with a line for each of these that is missing: te,cuda."),
    ] = None,
) -> None:
    """List versions, devices, what works here and what stands in; or look at a run.

    With --run the exit code is 1 if the run's last end was a hang or a failure.
    """
    if run is not None:
        if require is not None:
            raise UserError("--require and --run: one looks at this machine, the other at a run; give one of them")
        lines, code = overview(run, stacks=stacks)
        typer.echo("\n".join(lines))
        raise typer.Exit(code)
    if stacks:
        raise UserError("--stacks: shows the ranks of a run; give its folder with --run")
    from mega_rl.cli import doctor as machine

    if require is not None:
        lines = list(machine.missing([name for name in require.replace(" ", "").split(",") if name]))
        typer.echo("\n".join(lines) or f"all there: {require}")
        raise typer.Exit(1 if lines else 0)
    for line in machine.report():
        typer.echo(line)


recipes = Commands(name="recipes", help="List and show the recipes that come with the package.")


@recipes.callback(invoke_without_command=True)
def _commands(context: typer.Context) -> None:
    """List and show the recipes that come with the package; without a command: list them."""
    if context.invoked_subcommand is None:
        list_()


@recipes.command("list")
def list_() -> None:
    """Show the name of every packaged recipe and its first sentence."""
    for name in packaged.names():
        typer.echo(f"{name:<28}{packaged.summary(packaged.file_of(name))}")


@recipes.command("show")
def show_recipe(name: Annotated[str, typer.Argument(metavar="NAME", help="Name of a packaged recipe.")]) -> None:
    """Print a packaged recipe."""
    typer.echo(packaged.file_of(name).read_text(encoding="utf-8"), nl=False)


def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    gpus: Annotated[
        int, typer.Option(min=0, max=4096, help="Ranks of the run; default: the fewest its layout allows.")
    ] = 0,
    gpu_memory: Annotated[
        str, typer.Option(metavar="SIZE", help="Memory of one GPU, as 80G; default: of the GPUs here.")
    ] = "",
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs of one host.")] = 8,
    layers: Annotated[
        str, typer.Option(help="Whose layers engine.megatron.transformer_impl=auto is: auto, te or local.")
    ] = "auto",
    search: Annotated[
        bool, typer.Option("--search", help="Propose layouts of these GPUs that fit, least work first.")
    ] = False,
    gpu: Annotated[
        str, typer.Option(metavar="KIND", help="Expected time of a step on a100, h100, h200 or b200, too.")
    ] = "",
    server_gpus: Annotated[int, typer.Option(min=0, help="GPUs of each server that is joined.")] = 0,
    server_link: Annotated[
        float, typer.Option(min=0, metavar="GBIT", help="Gbit per second to a server that is joined.")
    ] = 0,
    as_json: Json = False,
) -> None:
    """Say from recipe and config.json whether a run fits its GPUs: memory by phase, and advice.

    With --gpu the expected time of a step, too. Nothing is started and no weight is read. Weights, gradients and
    optimizer state are exact; activations and caches are those of the longest sequences.
    """
    machine = planned.read_machine(
        gpus, gpus_per_node, gpu=gpu, gpu_memory=gpu_memory, layers=layers, server_link=server_link
    )
    made = planned.plan_recipe(recipe, overrides or [], machine, searched=search, gpu=gpu, server_ranks=server_gpus)
    show(planned.as_json(made) if as_json else {}, planned.as_text(made), as_json=as_json)
