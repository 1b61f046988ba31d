"""Start runs by Slurm, Kubernetes or Ray: what all three have."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import typer

from mega_rl.errors import UserError
from mega_rl.operations.launcher.supervisor import DEFAULT_RESTARTS

NodeRestarts: TypeAlias = Annotated[
    int, typer.Option("--node-restarts", min=0, help="Restarts of the run on new nodes or pods after a failure of one.")
]


@dataclass(frozen=True, kw_only=True)
class ClusterRun:
    """Options that all schedulers have; every field is an option of the command."""

    nodes: Annotated[int, typer.Option(min=1, help="Nodes of the run.")]
    nproc_per_node: Annotated[int, typer.Option(min=1, help="Ranks on each node, one GPU for each.")]
    max_restarts: Annotated[
        int, typer.Option(min=0, help="Restarts of dead or stuck ranks by their launchers, as of train.")
    ] = DEFAULT_RESTARTS
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[=VALUE]", help="Variable of the ranks; without a value, as it is here."),
    ] = None

    @property
    def launcher_options(self) -> list[str]:
        """Return the options of `mega-rl train` that are the same on every node."""
        options = ["--nnodes", str(self.nodes), "--nproc-per-node", str(self.nproc_per_node)]
        return [*options, "--max-restarts", str(self.max_restarts)]


@dataclass(frozen=True)
class RecipeFacts:
    """A recipe with its overrides, and the settings of it that a scheduler needs."""

    recipe: str  # path, or name of a packaged recipe
    text: str  # content of the file
    overrides: Sequence[str]  # KEY=VALUE
    run_dir: str
    resume: str  # checkpoint.resume
    device: str  # trainer.device
    saves: bool  # at intervals


def variables(given: Sequence[str] | None) -> dict[str, str]:
    """Return the variables that --env names. Raises UserError for a variable without a value here."""
    named = {}
    for text in given or ():
        name, sign, value = text.partition("=")
        if not name.isidentifier():
            raise UserError(f"--env={text}: {name!r} is not the name of a variable; write --env NAME=VALUE")
        if not sign and name not in os.environ:
            raise UserError(f"--env={name}: has no value here; write --env {name}=VALUE")
        named[name] = value if sign else os.environ[name]
    return named


def is_below(path: str, folders: Sequence[str]) -> bool:
    """Return whether an absolute path is one of the folders, or below one."""
    return any(path == folder or path.startswith(folder.rstrip("/") + "/") for folder in folders)
