"""`mega-rl plan`: memory, verdict, layouts and traffic of a run before it starts."""

from __future__ import annotations

from typing import Annotated

import typer

from mega_rl.cli.options import Overrides, Recipe
from mega_rl.plan.preflight.plan import PlanOptions, plan_lines


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
    rates: Annotated[
        list[str] | None,
        typer.Option("--rate", metavar="NAME=VALUE", help="Coefficient of the cost model, as network=25e9."),
    ] = None,
    server_gpus: Annotated[int, typer.Option("--server-gpus", min=0, help="GPUs of each server that is joined.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON, in bytes.")] = False,
) -> None:
    """Say whether a run fits its GPUs, from config.json and its recipe: memory by phase, and what to change.

    With --gpu the expected time of a step, too. Nothing is started and no weight is read. Weights, gradients and
    optimizer state are exact; activations and caches are those of the longest sequences.
    """
    options = PlanOptions(
        gpus,
        gpus_per_node,
        gpu_memory,
        layers,
        search=search,
        as_json=as_json,
        gpu=gpu,
        rates=rates or [],
        server_gpus=server_gpus,
    )
    for line in plan_lines(recipe, overrides or [], options):
        typer.echo(line)
