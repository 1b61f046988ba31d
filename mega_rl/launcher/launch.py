"""A launch: what a launcher is started with, and the launcher of a node as one call."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from mega_rl import __version__
from mega_rl.environment import python_module
from mega_rl.errors import RunError, UserError, limits_as_errors
from mega_rl.launcher.health import health_of
from mega_rl.launcher.nodes.channel import SILENT_S
from mega_rl.launcher.nodes.fleet import JOIN_S, Fleet
from mega_rl.launcher.nodes.member import Member, join
from mega_rl.launcher.nodes.messages import Joining
from mega_rl.launcher.nodes.node import LocalNode
from mega_rl.launcher.nodes.remote import Door
from mega_rl.launcher.outcome import Conclusion
from mega_rl.launcher.ranks import KEY, NodeRanks, interface_of
from mega_rl.launcher.restarts import RestartPolicy
from mega_rl.launcher.signals import StopSignals
from mega_rl.launcher.steps import RunProgress
from mega_rl.launcher.store import LOOPBACK, listen
from mega_rl.launcher.supervisor import Supervisor
from mega_rl.rollout.sglang.server.kept import keeping_servers
from mega_rl.tracking.progress import printable
from mega_rl.tracking.progress.terminal import ERASE_LINE

log = logging.getLogger(__name__)

MIN_KEY = 16  # characters


@dataclass(frozen=True)
class Launch:
    """Ranks of one node, in JSON the argument of the program `mega_rl.launcher`.

    program: a module and its arguments. run_dir: folder of the ranks' checkpoints and records; empty: they have none.
    resume: checkpoint.resume of the first start.
    master_addr, master_port: of node 0's launcher, for several nodes. spares: launchers that wait to take a node's
    place. join_s: until all have joined; silent_s: without a beat, after which a launcher is lost.
    """

    program: tuple[str, ...]
    nproc_per_node: int
    max_restarts: int = 0
    run_dir: str = ""
    resume: str = "auto"
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = LOOPBACK
    master_port: int = 0
    spares: int = 0
    join_s: float = JOIN_S
    silent_s: float = SILENT_S

    @classmethod
    def parse(cls, text: str) -> Launch:
        """Return the launch that `command` has written."""
        fields = json.loads(text)
        return cls(**{**fields, "program": tuple(fields["program"])})

    @property
    def command(self) -> list[str]:
        """Return the command that runs this launch as a process."""
        return python_module("mega_rl.launcher", json.dumps(asdict(self), ensure_ascii=False))

    @property
    def has_others(self) -> bool:
        """Return whether launchers of other nodes take part."""
        return self.nnodes + self.spares > 1

    @property
    def digest(self) -> str:
        """Return a digest that is equal on all nodes of a run."""
        same = replace(self, node_rank=0, max_restarts=0)
        return hashlib.sha256(f"{__version__} {same.command[-1]}".encode()).hexdigest()


def key_of(environment: Mapping[str, str]) -> bytes:
    """Return the key by which launchers know one another. Raises UserError without one, or with one to be guessed."""
    key = environment.get(KEY, "").strip()
    if len(key) < MIN_KEY:
        raise UserError(
            f"environment variable {KEY}: {'is too short' if key else 'is not set'}; launchers of several nodes know "
            "one another by it: set the same on every node, as made by 'openssl rand -hex 32'"
        )
    return key.encode()


def launch(settings: Launch, *, variables: Mapping[str, str] | None = None) -> int:
    """Run ranks on this node until they have ended for good; returns the exit code of the first that failed.

    variables: of the ranks, besides this process's. 0 when all have ended well; 128 + signal when a signal, to a rank
    or to this process, which hands it on, ended them.
    """
    # Node 0 decides for all nodes.
    restarts = settings.max_restarts > 0 or settings.node_rank > 0
    with StopSignals() as stop, keeping_servers(possible=restarts) as kept:
        variables = {**os.environ, **kept, **(variables or {})}
        os.environ.pop(KEY, None)  # which store and warden would inherit
        try:
            with limits_as_errors():
                conclusion = _run(settings, variables, stop)
        except (UserError, RunError) as error:
            conclusion = Conclusion(error.exit_code, str(error))
    if conclusion.line:
        start = ERASE_LINE if sys.stderr.isatty() else ""
        with contextlib.suppress(OSError):  # whoever read it has gone
            sys.stderr.write(f"{start}error: {printable(conclusion.line)}\n")
    return conclusion.code


def _run(settings: Launch, variables: Mapping[str, str], stop: StopSignals) -> Conclusion:
    if not settings.has_others:
        return _supervise(settings, NodeRanks(settings.program, variables=variables), stop, door=None)
    key = key_of(variables)

    def ranks_at(address: str) -> NodeRanks:
        return NodeRanks(settings.program, variables=variables, interface=interface_of(address))

    if settings.node_rank == 0:
        with listen(settings.master_addr, settings.master_port) as listener:
            door = Door(listener, key, silent_s=settings.silent_s)
            return _supervise(settings, ranks_at(str(listener.getsockname()[0])), stop, door=door)
    channel = join(
        settings.master_addr,
        settings.master_port,
        key,
        Joining(settings.node_rank, socket.gethostname(), settings.digest),
        join_s=settings.join_s,
        silent_s=settings.silent_s,
        stopped=lambda: stop.first != 0,
    )
    if channel is None:
        return Conclusion(128 + stop.first)
    return Member(channel, ranks_at, health_of(_run_dir(settings)), stop).follow()


def _supervise(settings: Launch, ranks: NodeRanks, stop: StopSignals, *, door: Door | None) -> Conclusion:
    health = health_of(_run_dir(settings))
    local = LocalNode(ranks, health)
    fleet = Fleet(local, nodes=settings.nnodes, spares=settings.spares, door=door, command=settings.digest)
    conclusion = Conclusion(RunError.exit_code, "the launcher of node 0 has ended by an error of its own")
    try:
        log.info("starting %d ranks", settings.nnodes * settings.nproc_per_node)
        fleet.gather(stopped=lambda: stop.first != 0, join_s=settings.join_s)
        conclusion = Supervisor(
            fleet,
            nproc=settings.nproc_per_node,
            master_addr=settings.master_addr if settings.has_others else LOOPBACK,
            health=health,
            progress=RunProgress(_run_dir(settings), health, resume=settings.resume),
            restarts=RestartPolicy(settings.max_restarts),
            stop=stop,
        ).run()
    except RunError as error:
        conclusion = Conclusion(error.exit_code, str(error))
    finally:
        ranks.close()
        local.close_store()
        fleet.finish(conclusion.code, conclusion.line)
    return conclusion


def _run_dir(settings: Launch) -> Path | None:
    return Path(settings.run_dir) if settings.run_dir else None
