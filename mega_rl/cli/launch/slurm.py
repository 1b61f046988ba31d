"""`mega-rl launch slurm`: prints a batch script, or submits it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from mega_rl.cli.launch.ray import variables
from mega_rl.cli.options import Overrides, Recipe, made, with_options
from mega_rl.config.loader import load
from mega_rl.config.rules import check as broken_rules
from mega_rl.config.schema import Config
from mega_rl.errors import UserError, UserErrors
from mega_rl.launcher.restarts import DEFAULT_RESTARTS
from mega_rl.schedulers.slurm.batch import ContainerMount, SbatchRun, check, render
from mega_rl.schedulers.slurm.submit import submit

log = logging.getLogger(__name__)

CPUS_PER_RANK = 8  # on nodes that the job shares


@dataclass(frozen=True)
class SlurmOptions:
    """Nodes of a Slurm cluster for a run; every field is an option."""

    nodes: Annotated[int, typer.Option("--nodes", min=1, help="Nodes of the run.")]
    nproc_per_node: Annotated[int, typer.Option("--nproc-per-node", min=1, help="Ranks on each node, a GPU each.")]
    submit: Annotated[
        bool, typer.Option("--submit", help="Submit the script with sbatch and print the job's number.")
    ] = False
    name: Annotated[str, typer.Option("--name", help="Name of the job.")] = "mega-rl"
    partition: Annotated[str, typer.Option("--partition", help="Partition, or several with commas.")] = ""
    account: Annotated[str, typer.Option("--account", help="Account that the job is charged to.")] = ""
    qos: Annotated[str, typer.Option("--qos", help="Quality of service.")] = ""
    time: Annotated[str, typer.Option("--time", help="Time limit, as 4:00:00 or 2-00; default: the partition's.")] = ""
    warning_s: Annotated[
        int, typer.Option("--warning-s", help="Seconds before the time limit in which the run ends its step and saves.")
    ] = 600
    gres: Annotated[str, typer.Option("--gres", help="GPUs by name, as gpu:h100:8; default: one for each rank.")] = ""
    cpus_per_node: Annotated[
        int | None, typer.Option("--cpus-per-node", min=1, help="CPUs of a shared node; default: 8 for each rank.")
    ] = None
    mem: Annotated[str, typer.Option("--mem", help="Memory of a node, as 900G; default: all of one's own node.")] = ""
    exclusive: Annotated[bool, typer.Option("--exclusive/--no-exclusive", help="Nodes without other jobs.")] = True
    output: Annotated[str, typer.Option("--output", help="File of the job's output, as sbatch reads it.")] = "%x-%j.out"
    sbatch: Annotated[
        list[str] | None,
        typer.Option("--sbatch", metavar="NAME[=VALUE]", help="Further option of sbatch, as constraint=h100."),
    ] = None
    image: Annotated[str, typer.Option("--image", help="Image with mega-rl, by pyxis; default: no container.")] = ""
    mount: Annotated[
        list[str] | None,
        typer.Option("--mount", metavar="PATH", help="/PATH or /PATH:/PATH/IN/THE/CONTAINER; repeatable."),
    ] = None
    venv: Annotated[
        Path | None, typer.Option("--venv", help="Environment with mega-rl on every node; default: this one.")
    ] = None
    env: Annotated[
        list[str] | None,
        typer.Option(
            "--env", metavar="NAME[=VALUE]", help="Variable of the ranks; without a value, the submission's: for keys."
        ),
    ] = None
    requeue: Annotated[
        bool, typer.Option("--requeue/--no-requeue", help="Again after the time limit, preemption or a lost node.")
    ] = True
    max_restarts: Annotated[
        int, typer.Option("--max-restarts", min=0, help="Restarts of dead or stuck ranks inside the job, as of train.")
    ] = DEFAULT_RESTARTS


@with_options
def slurm(recipe: Recipe, options: SlurmOptions, overrides: Overrides = None) -> None:
    """Print a batch script that trains on nodes of a Slurm cluster; --submit hands it to sbatch.

    The job works in the present folder, which every node needs under the same path, with recipe, models and data.
    """
    settings = overrides or []
    config = load(recipe, settings)
    run = _run(options, recipe, settings, config)
    problems = broken_rules(config, world_size=options.nodes * options.nproc_per_node)
    if problems := [*problems, *check(run, resume=config.checkpoint.resume)]:
        raise UserErrors(problems)
    if options.requeue and not config.checkpoint.save_interval:
        log.warning("checkpoint.save_interval=0: after the loss of a node the run would begin anew; set it to save")
    text = render(run)
    typer.echo(submit(text) if options.submit else text, nl=options.submit)


def _run(options: SlurmOptions, recipe: Path, settings: Sequence[str], config: Config) -> SbatchRun:
    """Return the run that the options ask for. Raises UserError."""
    ranks = options.nproc_per_node
    known = variables(options.env or [])
    given = [text.partition("=")[0] for text in options.env or [] if "=" in text]
    return made(
        SbatchRun,
        options,
        recipe=str(recipe.absolute()) if recipe.is_file() else str(recipe),
        overrides=settings,
        run_dir=config.trainer.run_dir,
        folder=str(Path.cwd()),
        python=_python(options),
        mounts=[ContainerMount.parse(text) for text in options.mount or []],
        gpus=0 if config.trainer.device == "cpu" else ranks,
        cpus=options.cpus_per_node or (0 if options.exclusive else CPUS_PER_RANK * ranks),
        environment={name: known[name] for name in given},
        inherited=[name for name in known if name not in given],
        options=_sbatch_options(options.sbatch or []),
    )


def _python(options: SlurmOptions) -> str:
    """Return the interpreter of the nodes' environment, empty with an image. Raises UserError."""
    if options.image:
        if options.venv is not None:
            raise UserError(f"--venv={options.venv}: has no effect with --image, which brings its own; leave one out")
        return ""
    if options.venv is None:
        return sys.executable
    python = options.venv.absolute() / "bin" / "python"
    if not python.exists():
        raise UserError(f"--venv={options.venv}: has no bin/python; give the folder of a virtual environment")
    return str(python)


def _sbatch_options(given: Sequence[str]) -> dict[str, str]:
    named: dict[str, str] = {}
    for text in given:
        name, sign, value = text.removeprefix("--").partition("=")
        if sign and not value:
            raise UserError(
                f"--sbatch={text}: has no value; write --sbatch {name}=VALUE, or --sbatch {name} for a flag"
            )
        if name in named:
            raise UserError(f"--sbatch={text}: {name} is given twice")
        named[name] = value
    return named
