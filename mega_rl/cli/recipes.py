"""`mega-rl recipes` lists and shows packaged recipes; `mega-rl plan` says whether one fits its GPUs."""

from __future__ import annotations

import shutil
import textwrap
from typing import Annotated

import typer

from mega_rl.cli import output
from mega_rl.cli.options import Json, Overrides, Recipe
from mega_rl.cli.output import Commands
from mega_rl.config import packaged
from mega_rl.plan import report

app = Commands(name="recipes", help="List and show the recipes that come with the package.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of a packaged recipe.")]


@app.callback(invoke_without_command=True)
def _commands(context: typer.Context) -> None:
    """List and show the recipes that come with the package; without a command: list them."""
    if context.invoked_subcommand is None:
        list_()


@app.command("list")
def list_() -> None:
    """Show the name of every packaged recipe and its first sentence."""
    names = packaged.names()
    column = max(map(len, names)) + 2
    width = max(shutil.get_terminal_size((10_000, 1)).columns, column + 40)
    for name in names:
        line = f"{name:<{column}}{packaged.summary(packaged.file_of(name))}"
        typer.echo(textwrap.fill(line, width, subsequent_indent=" " * column, break_on_hyphens=False))


@app.command()
def show(name: Name) -> None:
    """Print a packaged recipe."""
    typer.echo(packaged.file_of(name).read_text(encoding="utf-8"), nl=False)


def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    gpus: Annotated[
        int, typer.Option("--gpus", min=0, max=4096, help="Ranks of the run; default: the fewest its layout allows.")
    ] = 0,
    gpu_memory: Annotated[
        str, typer.Option("--gpu-memory", metavar="SIZE", help="Memory of one GPU, as 80G; default: of the GPUs here.")
    ] = "",
    gpus_per_node: Annotated[int, typer.Option("--gpus-per-node", min=1, help="GPUs of one host.")] = 8,
    layers: Annotated[
        str, typer.Option("--layers", help="Whose layers engine.megatron.transformer_impl=auto is: auto, te or local.")
    ] = "auto",
    search: Annotated[
        bool, typer.Option("--search", help="Propose layouts of these GPUs that fit, least work first.")
    ] = False,
    gpu: Annotated[
        str, typer.Option("--gpu", metavar="KIND", help="Expected time of a step on a100, h100, h200 or b200, too.")
    ] = "",
    server_gpus: Annotated[int, typer.Option("--server-gpus", min=0, help="GPUs of each server that is joined.")] = 0,
    as_json: Json = False,
) -> None:
    """Say whether a run fits its GPUs, from config.json and its recipe: memory by phase, and what to change.

    With --gpu the expected time of a step, too. Nothing is started and no weight is read. Weights, gradients and
    optimizer state are exact; activations and caches are those of the longest sequences.
    """
    machine = report.read_machine(gpus, gpus_per_node, gpu=gpu, gpu_memory=gpu_memory, layers=layers)
    made = report.plan_recipe(recipe, overrides or [], machine, searched=search, gpu=gpu, server_ranks=server_gpus)
    output.show(report.as_json(made) if as_json else {}, report.as_text(made), as_json=as_json)
