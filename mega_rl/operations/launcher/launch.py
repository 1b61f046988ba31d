"""A launch: its settings, and the launcher of a node as one call."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from mega_rl import __version__
from mega_rl.environment import interface_of
from mega_rl.errors import RunError, UserError
from mega_rl.operations.launcher.channel import Channel, ChannelLost, Door, Joining, join
from mega_rl.operations.launcher.nodes import (
    ENDED,
    FINISH,
    POLL_S,
    START,
    STOPPED_BY,
    LocalNode,
    RunNode,
    finish,
    gather,
)
from mega_rl.operations.launcher.ranks import KEY, LOOPBACK, NodeRanks, StopSignals, listen
from mega_rl.operations.launcher.run_health import NewestCheckpoints, RunHealth, RunProgress
from mega_rl.operations.launcher.supervisor import Conclusion, RestartPolicy, Supervisor
from mega_rl.tracking.health.records import SAVE_S
from mega_rl.tracking.progress import printable
from mega_rl.tracking.progress.terminal import ERASE_LINE
from mega_rl.untrusted import read_record

log = logging.getLogger(__name__)

MIN_KEY = 16  # characters


@dataclass(frozen=True)
class Launch:
    """The ranks of one node and their place in the run.

    program: a module and its arguments. run_dir: folder of the ranks' records and checkpoints. resume:
    checkpoint.resume of the first start. master_addr, master_port: of node 0's launcher, with several nodes.
    """

    program: tuple[str, ...]
    nproc_per_node: int
    run_dir: str
    max_restarts: int = 0
    resume: str = "auto"
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = LOOPBACK
    master_port: int = 0

    @classmethod
    def parse(cls, text: str) -> Launch:
        """Return the launch that `to_json` has written."""
        fields = json.loads(text)
        return cls(**{**fields, "program": tuple(fields["program"])})

    def to_json(self) -> str:
        """Return the launch as a JSON object."""
        return json.dumps(asdict(self), ensure_ascii=False)

    @property
    def digest(self) -> str:
        """Return a digest that is equal on all nodes of a run."""
        same = replace(self, node_rank=0, max_restarts=0)
        return hashlib.sha256(f"{__version__} {same.to_json()}".encode()).hexdigest()


def key_of(environment: Mapping[str, str]) -> bytes:
    """Return the key that launchers share. Raises UserError if it is missing or too short."""
    key = environment.get(KEY, "").strip()
    if len(key) < MIN_KEY:
        raise UserError(
            f"environment variable {KEY}: {'is too short' if key else 'is not set'}; launchers of several nodes know "
            "one another by it: set the same on every node, as made by 'openssl rand -hex 32'"
        )
    return key.encode()


def launch(
    settings: Launch,
    *,
    variables: Mapping[str, str] | None = None,
    newest: NewestCheckpoints = lambda run_dir: ("", ""),
) -> int:
    """Run this node's ranks to their end; return the exit code.

    variables: of the ranks, in addition to this process's. newest: finds checkpoints to restart from.
    """
    with StopSignals() as stop:
        variables = {**os.environ, **(variables or {})}
        os.environ.pop(KEY, None)  # children would inherit it
        try:
            conclusion = _run(settings, variables, stop, newest)
        except (UserError, RunError) as error:
            conclusion = Conclusion(error.exit_code, str(error))
    if conclusion.line:
        start = ERASE_LINE if sys.stderr.isatty() else ""
        with contextlib.suppress(OSError):  # the reader has gone
            sys.stderr.write(f"{start}error: {printable(conclusion.line)}\n")
    return conclusion.code


def _run(settings: Launch, variables: Mapping[str, str], stop: StopSignals, newest: NewestCheckpoints) -> Conclusion:
    health = RunHealth(Path(settings.run_dir))
    several = settings.nnodes > 1

    def node_at(address: str) -> LocalNode:
        interface = interface_of(address) if several else "lo"
        return LocalNode(NodeRanks(settings.program, variables=variables, interface=interface), health)

    key = key_of(variables) if several else b""
    if settings.node_rank > 0:
        joining = Joining(settings.node_rank, socket.gethostname(), settings.digest)
        channel = join(settings.master_addr, settings.master_port, key, joining, stop)
        if channel is None:
            return Conclusion(128 + stop.first)
        return follow(channel, node_at(channel.local_address), stop)
    with listen(settings.master_addr, settings.master_port) if several else nullcontext() as listener:
        local = node_at(LOOPBACK if listener is None else str(listener.getsockname()[0]))
        nodes: list[RunNode] = [local]
        conclusion = Conclusion(RunError.exit_code, "the launcher of node 0 has ended by an internal error")
        try:
            log.info("starting %d ranks", settings.nnodes * settings.nproc_per_node)
            if listener is not None:
                gather(nodes, settings.nnodes, Door(listener, key), command=settings.digest, stop=stop)
            conclusion = Supervisor(
                local,
                nodes,
                nproc=settings.nproc_per_node,
                master_addr=settings.master_addr if several else LOOPBACK,
                health=health,
                progress=RunProgress(Path(settings.run_dir), health, newest, resume=settings.resume),
                restarts=RestartPolicy(settings.max_restarts),
                stop=stop,
            ).run()
        except RunError as error:
            conclusion = Conclusion(error.exit_code, str(error))
        finally:
            local.ranks.close()
            finish(nodes, conclusion.code, conclusion.line)
        return conclusion


def follow(channel: Channel, node: LocalNode, stop: StopSignals) -> Conclusion:
    """Carry out orders until the run has ended or the launcher of node 0 is lost."""
    try:
        return _carry_out_orders(channel, node, stop)
    except (ChannelLost, ValueError) as error:
        return _without_node_0(node, stop, str(error))
    finally:
        node.ranks.close()
        channel.close()


def _carry_out_orders(channel: Channel, node: LocalNode, stop: StopSignals) -> Conclusion:
    generation: object = -1
    while True:
        for number in stop.take():  # to the ranks of this node, which agree with all others
            node.ranks.signal(number)
            channel.send({"type": STOPPED_BY, "number": number})
            if generation == -1:  # before the first start it only leaves
                return Conclusion(128 + number)
        for end in node.ranks.poll():
            channel.send({"type": ENDED, "generation": generation, **asdict(end)})
        for message in channel.receive():
            kind, values = str(message.get("type")), {name: one for name, one in message.items() if name != "type"}
            if kind == FINISH:
                return read_record(Conclusion, values)
            node.order(kind, **values)
            generation = values["generation"] if kind == START else generation
        time.sleep(POLL_S)


def _without_node_0(node: LocalNode, stop: StopSignals, reason: str) -> Conclusion:
    """Let the ranks save and end, and kill the rest; node 0's ranks do the same."""
    line = f"the launcher of node 0 is lost: {reason}"
    if node.ranks.processes:
        log.warning("%s; the ranks of this node end their step and save", line)
    node.ranks.signal(signal.SIGTERM)
    deadline = time.monotonic() + SAVE_S
    while node.ranks.processes and time.monotonic() < deadline:
        for number in stop.take():  # a second Ctrl-C ends at once
            node.ranks.signal(number)
        node.ranks.poll()
        time.sleep(POLL_S)
    return Conclusion(128 + stop.first if stop.first else RunError.exit_code, line)
