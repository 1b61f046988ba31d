"""Nodes of a run as node 0 sees them: members, orders and reports."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TypeAlias

from mega_rl.errors import RunError, UserError
from mega_rl.operations.launcher.channel import JOIN_S, Channel, ChannelLost, Door, Joining, Message
from mega_rl.operations.launcher.ranks import SIGNALS, Assignment, NodeRanks, RankEnd, StopSignals
from mega_rl.operations.launcher.run_health import RunHealth
from mega_rl.untrusted import read_record, shown

log = logging.getLogger(__name__)

START, SIGNAL, END, KILL, FINISH = "start", "signal", "end", "kill", "finish"  # orders of node 0
ENDED, STOPPED_BY = "ended", "stopped by"  # reports to it
REMIND_S = 30.0
POLL_S = 0.05
FINISH_S = 5.0  # for launchers that were told to end to hang up

# Since a node was asked last: ranks that ended, the signal that its launcher passed on (0: none), and why the launcher
# and its ranks are gone (empty: they are there).
News: TypeAlias = tuple[Sequence[RankEnd], int, str]


def signal_number(message: Message) -> int:
    """Return the signal to pass on, or that a launcher passed on. Raises ValueError."""
    for number in SIGNALS:
        if message.get("number") == number:
            return number
    raise ValueError(f"number must be a signal, not {shown(message.get('number'))}")


class LocalNode:
    """The ranks of this process's node."""

    number = 0  # node 0 asks only itself and its remote nodes

    def __init__(self, ranks: NodeRanks, health: RunHealth) -> None:
        self.ranks, self._health = ranks, health
        self.lifeline: int | None = None  # on node 0; see `rank_store`

    def order(self, kind: str, **values: object) -> None:
        """Carry out an order of node 0 for the ranks. Raises ValueError for wrong values."""
        if kind == START:
            self.ranks.start(read_record(Assignment, values), lifeline=self.lifeline)
        elif kind == SIGNAL:
            self.ranks.signal(signal_number(values))
        elif kind == END:
            if values.get("collect"):
                self._health.collect(self.ranks.processes)
            self.ranks.end()
        elif kind == KILL:
            self.ranks.kill()

    def poll(self) -> News:
        """Return the ends of ranks."""
        return self.ranks.poll(), 0, ""


class RemoteNode:
    """A node whose launcher has joined. Calls return at once; `poll` tells what came of them."""

    def __init__(self, channel: Channel, joined: Joining) -> None:
        self.number, self.host = joined.number, joined.host
        self._channel = channel
        self._generation: object = -1
        self._lost = ""

    def order(self, kind: str, **values: object) -> None:
        """Send an order: START with an `Assignment`, SIGNAL, END (`collect`: write stacks before), KILL or FINISH."""
        self._generation = values.get("generation", self._generation)
        try:
            if not self._lost:
                self._channel.send({"type": kind, **values})
        except ChannelLost as error:
            self._lost = str(error)

    def poll(self) -> News:
        """Return the launcher's reports; for a lost node each time that it is lost."""
        ends: list[RankEnd] = []
        stopped_by = 0
        try:
            if self._lost:
                raise ChannelLost(self._lost)
            for message in self._channel.receive():
                if message.get("type") == ENDED and message.get("generation") == self._generation:
                    ends.append(read_record(RankEnd, message))
                elif message.get("type") == STOPPED_BY:
                    stopped_by = signal_number(message)
        except (ChannelLost, ValueError) as error:
            self._lost = str(error)
            self._channel.close()
            return ends, stopped_by, f"node {self.number} ({self.host}) is lost: {error}"
        return ends, stopped_by, ""


RunNode: TypeAlias = LocalNode | RemoteNode


def gather(members: list[RunNode], size: int, door: Door, *, command: str, stop: StopSignals) -> None:
    """Let launchers in until a run has its nodes, or a signal came; sort them.

    command: digest that launchers must join with. Raises RunError with the missing numbers after `JOIN_S` seconds.
    """
    begun, reminded = time.monotonic(), 0.0
    refused: list[RunNode] = []
    while not stop.first and (missing := sorted({*range(size)} - {node.number for node in members})):
        for channel, joined in door.arrivals():
            node = RemoteNode(channel, joined)
            if joined.command != command:
                reason = "it was started with other options or settings than node 0"
            else:
                reason = "" if node.number in missing else f"--node-rank={node.number}: this number is taken"
            (refused if reason else members).append(node)
            if reason:
                log.warning("node %d (%s) is not let in: %s", node.number, node.host, reason)
                line = f"{reason}; start the same command on every node, each with its own --node-rank"
                node.order(FINISH, code=UserError.exit_code, line=line)
        waited = time.monotonic() - begun
        names = f"node{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} of {size}"
        if waited >= JOIN_S:
            raise RunError(f"the launcher of {names} has not joined within {JOIN_S:g} s; look at its output there")
        if waited - reminded >= REMIND_S:
            reminded = waited
            log.info("waiting for the launcher of %s, for %.0f of at most %.0f s", names, waited, JOIN_S)
        time.sleep(POLL_S)
    members.sort(key=lambda node: node.number)


def finish(nodes: Sequence[RunNode], code: int, reason: str) -> None:
    """End the launchers of other nodes, and wait at most FINISH_S for them."""
    left = [node for node in nodes if isinstance(node, RemoteNode)]
    for node in left:
        node.order(FINISH, code=code, line=reason)
    deadline = time.monotonic() + FINISH_S
    while (left := [node for node in left if not node.poll()[2]]) and time.monotonic() < deadline:
        time.sleep(0.02)
