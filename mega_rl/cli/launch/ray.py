"""`mega-rl launch ray`: the driver's exit code is the run's."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from mega_rl.cli.layout_options import Overrides, Recipe, made, with_options
from mega_rl.config.loader import load
from mega_rl.config.rules import check
from mega_rl.config.schema import Config
from mega_rl.errors import UserError, UserErrors
from mega_rl.launcher.restarts import DEFAULT_RESTARTS
from mega_rl.schedulers.ray.driver import NodesRun, drive
from mega_rl.schedulers.ray.placement import RayCluster
from mega_rl.tracking import progress

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RayOptions:
    """Nodes of a Ray cluster for a run; every field is an option."""

    nodes: Annotated[int, typer.Option("--nodes", min=1, help="Nodes of the run.")]
    nproc_per_node: Annotated[int, typer.Option("--nproc-per-node", min=1, help="Ranks on each node, a GPU each.")]
    cpus_per_node: Annotated[
        int | None, typer.Option("--cpus-per-node", min=1, help="CPUs asked of each node; default: one for each rank.")
    ] = None
    address: Annotated[
        str,
        typer.Option(
            "--address", help="Ray cluster as HOST:PORT, or local for one of this machine; default: RAY_ADDRESS."
        ),
    ] = ""
    wait_s: Annotated[float, typer.Option("--wait-s", min=0, help="Longest wait for free nodes, in seconds.")] = 600.0
    max_restarts: Annotated[
        int, typer.Option("--max-restarts", min=0, help="Restarts of dead or stuck ranks on the nodes, as of train.")
    ] = DEFAULT_RESTARTS
    node_restarts: Annotated[
        int, typer.Option("--node-restarts", min=0, help="New placements of the run after a lost node.")
    ] = 3
    env: Annotated[
        list[str] | None,
        typer.Option("--env", metavar="NAME[=VALUE]", help="Variable of the ranks; without a value, as it is here."),
    ] = None


@with_options
def ray(recipe: Recipe, options: RayOptions, overrides: Overrides = None) -> None:
    """Train on nodes of a Ray cluster: a placement group by node, one launcher on each.

    Output of all nodes is written here; signals go to the ranks, which save and end. Works in `ray job submit`.
    """
    settings = overrides or []
    progress.show_progress(live=False)
    config = load(recipe, settings)
    if problems := check(config, world_size=options.nodes * options.nproc_per_node):
        raise UserErrors(problems)
    environment = variables(options.env or [])
    cluster = RayCluster(options.address)
    try:
        if cluster.ships_folder():
            check_shared(config)
        bundle = {"CPU": float(options.cpus_per_node or options.nproc_per_node)}
        if config.trainer.device == "cuda" or (config.trainer.device == "auto" and cluster.has_gpus()):
            bundle = {"GPU": float(options.nproc_per_node), **bundle}
        run = made(
            NodesRun,
            options,
            arguments=["--config", str(recipe), *settings],
            run_dir=config.trainer.run_dir,
            resume=config.checkpoint.resume,
            environment=environment,
        )
        if options.node_restarts and not config.checkpoint.save_interval:
            log.warning("checkpoint.save_interval=0: after the loss of a node the run would begin anew; set it to save")
        code = drive(
            run,
            lambda stop: cluster.place(options.nodes, bundle, wait_s=options.wait_s, stop=stop),
            write=typer.echo,
        )
    finally:
        cluster.close()
    raise typer.Exit(code)


def variables(given: Sequence[str]) -> dict[str, str]:
    """Return variables as the options name them. Raises UserError for one without a value here."""
    named: dict[str, str] = {}
    for text in given:
        name, sign, value = text.partition("=")
        if not name.isidentifier():
            raise UserError(f"--env={text}: {name!r} is not the name of a variable; write --env NAME=VALUE")
        if not sign and name not in os.environ:
            raise UserError(f"--env={name}: has no value here; write --env {name}=VALUE")
        named[name] = value if sign else os.environ[name]
    return named


def check_shared(config: Config) -> None:
    """Raise UserError where every node would write into a folder of its own."""
    if not Path(config.trainer.run_dir).is_absolute():
        raise UserError(
            f"trainer.run_dir={config.trainer.run_dir}: is relative, and each node of this Ray job works in a copy of "
            "the working directory; give the path of a folder that all nodes share, from the root on"
        )
