"""`mega-rl train`: checks the settings without torch, then trains, or becomes the launcher of its ranks."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Annotated

import typer

from mega_rl.cli.launch_options import LaunchOptions, become
from mega_rl.cli.layout_options import with_options
from mega_rl.config import loader, render
from mega_rl.config.origins import pinned_overrides
from mega_rl.environment import variables_of
from mega_rl.schedulers.slurm.tasks import become_rank
from mega_rl.tracking import progress


@with_options
def train(
    launch: LaunchOptions,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Settings that replace the recipe's, as optim.lr=2e-6."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="Recipe: a YAML file, or the name of a packaged one, as quickstart.")
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the resolved config, marking what differs from the defaults.")
    ] = False,
) -> None:
    """Train a policy with the settings of a recipe and of the command line."""
    settings = overrides or []
    if launch.nproc_per_node is None:
        become_rank()
    progress.show_progress()
    if print_config:
        render.print_config(loader.load(config, settings))
        return

    if launch.nproc_per_node not in (None, 1):
        logging.getLogger("mega_rl.config").setLevel(logging.WARNING)  # the ranks read the settings again
    launch.check(os.environ)
    with progress.phase(f"checking {config or 'the settings'}, models and data", announce=True):
        from mega_rl.plan.preflight import preflight

        resolved = preflight(config, settings, world_size=launch.world_size, launchers=launch.nnodes + launch.spares)
    if launch.needs_launcher:
        recipe = [] if config is None else ["--config", str(config)]
        program = ["mega_rl.cli", "train", *recipe, *settings, *pinned_overrides(resolved)]
        become(launch.launch(program, run_dir=resolved.trainer.run_dir, resume=resolved.checkpoint.resume))
    if not resolved.metrics.progress_bar:
        progress.show_progress(live=False)
    with progress.importing("PyTorch and Megatron-Core", announce=True):
        from mega_rl.accelerator import prepare

        accelerator = prepare(
            resolved.trainer.device,
            variables=variables_of(resolved.engine, resolved.rollout, resolved.trainer),
            deepep=resolved.engine.megatron.moe.dispatcher == "deepep",
        )
        from mega_rl.assemble import train as run

    raise typer.Exit(run(resolved, accelerator))
