"""`mega-rl launch kubernetes`: writes manifests, and asks no cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from mega_rl.cli.launch.ray import variables
from mega_rl.cli.options import Overrides, Recipe, made, with_options
from mega_rl.config import packaged
from mega_rl.config.loader import load
from mega_rl.config.rules import check as broken_rules
from mega_rl.errors import UserError, UserErrors
from mega_rl.launcher.restarts import DEFAULT_RESTARTS
from mega_rl.schedulers.kubernetes import JobSetRun, Mount, check, render


@dataclass(frozen=True)
class PodOptions:
    """Nodes of a Kubernetes cluster for a run; every field is an option."""

    nodes: Annotated[int, typer.Option("--nodes", min=1, help="Nodes of the run, a pod each.")]
    image: Annotated[str, typer.Option("--image", help="Image whose entry point is mega-rl, with a tag or digest.")]
    nproc_per_node: Annotated[int, typer.Option("--nproc-per-node", min=1, help="Ranks in each pod, a GPU each.")] = 8
    name: Annotated[str, typer.Option("--name", help="Name of the JobSet and its Secret.")] = "mega-rl"
    namespace: Annotated[str, typer.Option("--namespace", help="Namespace; default: that of kubectl.")] = ""
    mount: Annotated[
        list[str] | None,
        typer.Option("--mount", metavar="SOURCE", help="pvc:CLAIM:/PATH or host:/PATH/ON/THE/NODE:/PATH; repeatable."),
    ] = None
    cpus: Annotated[int | None, typer.Option("--cpus", min=1, help="CPUs of a pod; default: 8 for each rank.")] = None
    memory: Annotated[str | None, typer.Option("--memory", help="Memory of a pod; default: 64Gi for each rank.")] = None
    shm: Annotated[str, typer.Option("--shm", help="Most of a pod's memory that /dev/shm may take.")] = "64Gi"
    rdma: Annotated[
        list[str] | None, typer.Option("--rdma", metavar="RESOURCE=COUNT", help="RDMA devices of a pod, as rdma/hca=8.")
    ] = None
    env: Annotated[
        list[str] | None, typer.Option("--env", metavar="NAME[=VALUE]", help="Variable of the ranks; repeatable.")
    ] = None
    secret: Annotated[
        list[str] | None, typer.Option("--secret", help="Secret whose entries are variables of the ranks.")
    ] = None
    node_selector: Annotated[
        list[str] | None, typer.Option("--node-selector", metavar="LABEL=VALUE", help="Label of the nodes to use.")
    ] = None
    pull_secret: Annotated[str, typer.Option("--pull-secret", help="Secret of the image's registry.")] = ""
    queue: Annotated[str, typer.Option("--queue", help="Local queue of Kueue, which admits all pods at once.")] = ""
    priority_class: Annotated[str, typer.Option("--priority-class", help="PriorityClass of the pods.")] = ""
    host_network: Annotated[
        bool, typer.Option("--host-network", help="The nodes' network, for RDMA that needs it; no NetworkPolicy.")
    ] = False
    max_restarts: Annotated[
        int, typer.Option("--max-restarts", min=0, help="Restarts of dead or stuck ranks in their pods, as of train.")
    ] = DEFAULT_RESTARTS
    node_restarts: Annotated[
        int, typer.Option("--node-restarts", min=0, help="Restarts of all pods after a failure of one.")
    ] = 3
    grace_s: Annotated[
        int, typer.Option("--grace-s", min=30, help="Seconds in which a pod may end its step and save.")
    ] = 600
    user: Annotated[int, typer.Option("--user", min=1, help="User and group of the processes, by number.")] = 1000


@with_options
def kubernetes(recipe: Recipe, options: PodOptions, overrides: Overrides = None) -> None:
    """Print a JobSet that trains on nodes of a Kubernetes cluster; `kubectl apply -f -` starts it.

    The recipe travels along. Models, data and the run folder are on volumes, below paths of --mount.
    """
    settings = overrides or []
    config = load(recipe, settings)
    run = _run(options, recipe, settings, device=config.trainer.device)
    problems = broken_rules(config, world_size=options.nodes * options.nproc_per_node)
    if problems := [*problems, *check(run, run_dir=config.trainer.run_dir, resume=config.checkpoint.resume)]:
        raise UserErrors(problems)
    typer.echo(render(run), nl=False)


def _run(options: PodOptions, recipe: Path, settings: Sequence[str], *, device: str) -> JobSetRun:
    """Return the run that the options ask for. Raises UserError."""
    ranks = options.nproc_per_node
    return made(
        JobSetRun,
        options,
        recipe=_text_of(recipe),
        overrides=settings,
        gpus=0 if device == "cpu" else ranks,
        cpus=options.cpus or 8 * ranks,
        memory=options.memory or f"{64 * ranks}Gi",
        mounts=[Mount.parse(text) for text in options.mount or []],
        rdma={name: _count(name, count) for name, count in _pairs("--rdma", options.rdma or []).items()},
        environment=variables(options.env or []),
        secrets=options.secret or [],
        node_selector=_pairs("--node-selector", options.node_selector or []),
        restarts=options.node_restarts,
    )


def _text_of(recipe: Path) -> str:
    """Return a recipe's text; the loader has read it before."""
    file = recipe if recipe.is_file() else packaged.file_of(str(recipe))
    return file.read_text(encoding="utf-8")


def _pairs(option: str, given: Sequence[str]) -> dict[str, str]:
    pairs = {}
    for text in given:
        name, sign, value = text.partition("=")
        if not (name and sign and value):
            raise UserError(f"{option}={text}: needs a name and a value, as {option} NAME=VALUE")
        pairs[name] = value
    return pairs


def _count(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise UserError(f"--rdma={name}={text}: needs a whole number of at least 1")
    return int(text)
