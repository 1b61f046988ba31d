"""Options of `mega-rl train` that start ranks, on this node and others."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, NoReturn

import typer

from mega_rl.cli.layout_options import made
from mega_rl.errors import UserError
from mega_rl.launcher.launch import Launch, key_of
from mega_rl.launcher.restarts import DEFAULT_RESTARTS
from mega_rl.launcher.signals import SIGNALS
from mega_rl.launcher.store import LOOPBACK
from mega_rl.tracking import progress


@dataclass(frozen=True)
class LaunchOptions:
    """Ranks to start; every field is an option."""

    nproc_per_node: Annotated[
        int | None, typer.Option("--nproc-per-node", min=1, help="Start this many ranks on this machine.")
    ] = None
    max_restarts: Annotated[
        int | None,
        typer.Option(
            "--max-restarts",
            min=0,
            help=f"Restarts from the newest checkpoint when a rank dies or is stuck; default: {DEFAULT_RESTARTS}.",
        ),
    ] = None
    nnodes: Annotated[int, typer.Option("--nnodes", min=1, help="Nodes; start this command on each of them.")] = 1
    node_rank: Annotated[
        int, typer.Option("--node-rank", min=0, help="Number of this node, from 0; spares are numbered on.")
    ] = 0
    master_addr: Annotated[
        str, typer.Option("--master-addr", help="Name or address of node 0, by which the other nodes reach it.")
    ] = ""
    master_port: Annotated[
        int, typer.Option("--master-port", min=1, max=65535, help="Port at which the launcher of node 0 listens.")
    ] = 29500
    spares: Annotated[
        int, typer.Option("--spares", min=0, help="Further nodes that wait to take the place of a lost or failing one.")
    ] = 0

    @property
    def world_size(self) -> int | None:
        """Return the number of ranks; None where the environment of a launcher says it."""
        return None if self.nproc_per_node is None else self.nnodes * self.nproc_per_node

    @property
    def needs_launcher(self) -> bool:
        """Return whether ranks are children of a launcher: more than one, or one that may be started again."""
        return self.world_size is not None and (self.world_size > 1 or self.spares > 0 or bool(self.max_restarts))

    def check(self, environment: Mapping[str, str]) -> None:
        """Raise UserError for options that have no effect, are missing or do not fit together."""
        if self.nproc_per_node is None:
            given = {"--max-restarts": self.max_restarts is not None, "--nnodes": self.nnodes > 1}
            given |= {"--node-rank": self.node_rank > 0, "--master-addr": self.master_addr != ""}
            given |= {"--spares": self.spares > 0}
            if options := [option for option, is_given in given.items() if is_given]:
                raise UserError(f"{options[0]}: is of ranks that this command starts; add --nproc-per-node")
            return
        if "RANK" in environment:
            raise UserError(
                f"--nproc-per-node={self.nproc_per_node} under a launcher that already started ranks; leave it out"
            )
        if self.node_rank >= (launchers := self.nnodes + self.spares):
            raise UserError(
                f"--node-rank={self.node_rank}: must be below --nnodes={self.nnodes} plus --spares={self.spares}"
            )
        if launchers > 1:
            if not self.master_addr:
                raise UserError("--master-addr: is missing; give the name or address of node 0, the same on every node")
            key_of(environment)

    def launch(self, program: Sequence[str], *, run_dir: str, resume: str) -> Launch:
        """Return the launch of a program, a module and its arguments, on this node.

        resume: its checkpoint.resume.
        """
        assert self.nproc_per_node is not None
        restarts = DEFAULT_RESTARTS if self.max_restarts is None else self.max_restarts
        launch = made(Launch, self, program=tuple(program), max_restarts=restarts, run_dir=run_dir, resume=resume)
        one_node = self.nnodes + self.spares == 1
        return replace(launch, master_addr=LOOPBACK, master_port=0) if one_node else launch


def become(launch: Launch) -> NoReturn:
    """Replace this process by a launcher, which then gets the signals and gives the exit code itself."""
    progress.close()
    sys.stdout.flush()
    sys.stderr.flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # one that comes now waits until the launcher takes it
    os.execve(sys.executable, launch.command, os.environ)
