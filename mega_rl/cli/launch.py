"""`mega-rl launch`: runs on several nodes, started by the scheduler of a cluster.

As a program, `python -m mega_rl.cli.launch LAUNCH` (a `Launch` in JSON), it is the launcher of one node.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

import typer

from mega_rl.checkpoint.folders import CHECKPOINTS, complete
from mega_rl.checkpoint.memory import place
from mega_rl.cli.options import Overrides, Recipe, with_options
from mega_rl.cli.output import Commands
from mega_rl.config import packaged, rules
from mega_rl.config.loader import load
from mega_rl.environment import python_module
from mega_rl.errors import UserError, UserErrors
from mega_rl.operations.launcher.launch import Launch, launch
from mega_rl.operations.launcher.ranks import SIGNALS
from mega_rl.operations.schedulers import RecipeFacts
from mega_rl.operations.schedulers import kubernetes as jobset
from mega_rl.operations.schedulers import slurm as batch
from mega_rl.operations.schedulers.ray import RayCluster, RayRun, drive
from mega_rl.tracking import progress
from mega_rl.tracking.progress.terminal import show_progress

log = logging.getLogger(__name__)

app = Commands(name="launch", help="Runs on several nodes, by the scheduler of a cluster.")


@app.command()
@with_options
def ray(recipe: Recipe, options: RayRun, overrides: Overrides = None) -> None:
    """Train on nodes of a Ray cluster: a placement group by node, one launcher on each.

    Output of all nodes is written here; signals go to the ranks, which save and end. Works in `ray job submit`.
    """
    progress.show_progress(live=False)
    facts = _read(recipe, overrides or [], lambda facts: [], ranks=options.nodes * options.nproc_per_node)
    cluster = RayCluster(options.address)
    try:
        if cluster.ships_folder() and not Path(facts.run_dir).is_absolute():
            raise UserError(
                f"trainer.run_dir={facts.run_dir}: is relative, and each node of this Ray job works in a copy of the "
                "working directory; give the path of a folder that all nodes share, from the root on"
            )
        bundle = {"CPU": float(options.cpus_per_node or options.nproc_per_node)}
        if facts.device == "cuda" or (facts.device == "auto" and cluster.has_gpus()):
            bundle = {"GPU": float(options.nproc_per_node), **bundle}
        code = drive(
            options,
            facts,
            lambda stop: cluster.place(options.nodes, bundle, wait_s=options.wait_s, stop=stop),
            write=typer.echo,
        )
    finally:
        cluster.close()
    raise typer.Exit(code)


@app.command()
@with_options
def kubernetes(recipe: Recipe, options: jobset.JobSetRun, overrides: Overrides = None) -> None:
    """Print a JobSet that trains on a Kubernetes cluster; `kubectl apply -f -` starts it.

    The recipe travels along. Models, data and the run folder are on volumes, below paths of --mount.
    """
    check = partial(jobset.check, options)
    facts = _read(recipe, overrides or [], check, ranks=options.nodes * options.nproc_per_node)
    typer.echo(jobset.render(options, facts), nl=False)


@app.command()
@with_options
def slurm(recipe: Recipe, options: batch.SlurmRun, overrides: Overrides = None) -> None:
    """Print a batch script that trains on a Slurm cluster; --submit hands it to sbatch.

    The job works in the present folder, which every node needs under the same path, with recipe, models and data.
    """
    folder = str(Path.cwd())
    check = partial(batch.check, options, folder=folder)
    facts = _read(recipe, overrides or [], check, ranks=options.nodes * options.nproc_per_node)
    text = batch.render(options, facts, folder=folder)
    typer.echo(batch.submit(text) if options.submit else text, nl=options.submit)


def _read(
    recipe: Path, overrides: Sequence[str], check: Callable[[RecipeFacts], Sequence[str]], *, ranks: int
) -> RecipeFacts:
    """Return a recipe's facts for schedulers. Raises UserErrors for its broken rules and those of `check`."""
    config = load(recipe, overrides)
    file = recipe if recipe.is_file() else packaged.file_of(str(recipe))
    facts = RecipeFacts(
        recipe=str(recipe.absolute()) if recipe.is_file() else str(recipe),
        text=file.read_text(encoding="utf-8"),
        overrides=overrides,
        run_dir=config.trainer.run_dir,
        resume=config.checkpoint.resume,
        device=config.trainer.device,
        saves=bool(config.checkpoint.save_interval),
    )
    if problems := [*rules.check(config, world_size=ranks), *check(facts)]:
        raise UserErrors(problems)
    if not facts.saves:
        log.warning("checkpoint.save_interval=0: after the loss of a node the run would begin anew; set it to save")
    return facts


def become(settings: Launch) -> NoReturn:
    """Replace this process by a launcher, which gets the signals and gives the exit code."""
    progress.close()
    sys.stdout.flush()
    sys.stderr.flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # a signal that comes now waits until the launcher takes it
    os.execve(sys.executable, command(settings), os.environ)


def command(settings: Launch) -> list[str]:
    """Return the command that runs a launch as a process."""
    return python_module("mega_rl.cli.launch", settings.to_json())


def newest_checkpoints(run_dir: Path, *, shm: Path = place.SHM) -> tuple[str, str]:
    """Return a run's newest complete checkpoints, NAME@TIME: (on disk, in memory); "" for none."""
    root = run_dir / CHECKPOINTS
    history = place.read_history(root)
    if not history:
        return _newest_in(root), ""
    folder = place.folder_of(shm, os.path.realpath(run_dir), history)
    return _newest_in(root), "" if place.unusable(folder) else _newest_in(folder)


def _newest_in(folder: Path) -> str:
    try:
        folders = complete(folder)
        return f"{folders[-1].name}@{folders[-1].stat().st_mtime_ns}" if folders else ""
    except (OSError, UserError):  # the ranks say what is wrong with the folder
        return ""


def main(argument: str) -> int:
    """Run the launcher and return its exit code."""
    settings = Launch.parse(argument)
    show_progress(live=False, beside_ranks=True)
    try:
        return launch(settings, newest=newest_checkpoints)
    finally:
        progress.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
