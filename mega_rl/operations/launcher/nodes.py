"""Nodes of a run as node 0 sees them: who takes part, who joins, who is replaced."""

from __future__ import annotations

import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from mega_rl.errors import RunError, UserError
from mega_rl.operations.launcher.channel import Channel, ChannelLost, Door, Joining, Message
from mega_rl.operations.launcher.ranks import Assignment, NodeRanks, RankEnd
from mega_rl.operations.launcher.run_health import RunHealth
from mega_rl.operations.launcher.signals import SIGNALS
from mega_rl.operations.launcher.store import RankStore
from mega_rl.untrusted import read_record, shown

log = logging.getLogger(__name__)

START, SIGNAL, END, KILL, FINISH = "start", "signal", "end", "kill", "finish"  # orders of node 0
ENDED, STOPPED_BY = "ended", "stopped by"  # reports to it
JOIN_S = 600.0  # images are pulled, disks are mounted
REMIND_S = 30.0
POLL_S = 0.05
FINISH_S = 5.0  # for launchers that were told to end to hang up
FAULTS = 2  # failures of a node's ranks after which a spare takes its place


@dataclass(frozen=True)
class Ended:
    """Report of a launcher: ranks of a generation that have ended."""

    generation: int
    ends: tuple[RankEnd, ...]


@dataclass(frozen=True)
class NodeNews:
    """Events of a node since the last time it was asked.

    stopped_by: signal that its launcher got and passed on. lost: why the launcher, and so its ranks, are gone.
    """

    ends: Sequence[RankEnd] = ()
    stopped_by: int = 0
    lost: str = ""


def signal_number(message: Message) -> int:
    """Return the signal to pass on, or that a launcher passed on. Raises ValueError."""
    for number in SIGNALS:
        if message.get("number") == number:
            return number
    raise ValueError(f"number must be a signal, not {shown(message.get('number'))}")


class LocalNode:
    """The ranks of this process's node; on node 0 also the store of all ranks."""

    def __init__(self, ranks: NodeRanks, health: RunHealth, *, number: int = 0) -> None:
        self.number, self.host = number, socket.gethostname()
        self.ranks, self._health = ranks, health
        self._store: RankStore | None = None

    def open_store(self, address: str) -> int:
        """Open the store of a generation and return its port."""
        self.close_store()
        self._store = RankStore(address)
        return self._store.port

    def close_store(self) -> None:
        """Close the store."""
        if self._store is not None:
            self._store.close()
        self._store = None

    def order(self, kind: str, **values: object) -> None:
        """Carry out an order of node 0 for the ranks. Raises ValueError for wrong values."""
        if kind == START:
            lifeline = None if self._store is None else self._store.lifeline
            self.ranks.start(read_record(Assignment, values), lifeline=lifeline)
        elif kind == SIGNAL:
            self.ranks.signal(signal_number(values))
        elif kind == END:
            if values.get("collect"):
                self._health.collect(self.ranks.processes)
            self.ranks.end()
        elif kind == KILL:
            self.ranks.kill()

    def poll(self) -> NodeNews:
        """Return the ends of ranks."""
        return NodeNews(self.ranks.poll())

    def leave(self, within_s: float) -> bool:
        """Return True: this launcher waits for the others."""
        return True


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

    def poll(self) -> NodeNews:
        """Return the launcher's reports; for a lost node each time that it is lost."""
        ends: list[RankEnd] = []
        stopped_by = 0
        try:
            if self._lost:
                raise ChannelLost(self._lost)
            for message in self._channel.receive():
                if message.get("type") == ENDED:
                    report = read_record(Ended, message)
                    ends += report.ends if report.generation == self._generation else ()
                elif message.get("type") == STOPPED_BY:
                    stopped_by = signal_number(message)
        except (ChannelLost, ValueError) as error:
            self._lost = str(error)
            self._channel.close()
            return NodeNews(ends, stopped_by, lost=f"node {self.number} ({self.host}) is lost: {error}")
        return NodeNews(ends, stopped_by)

    def leave(self, within_s: float) -> bool:
        """Return whether the launcher hangs up within this time, as it does after FINISH."""
        deadline = time.monotonic() + within_s
        while not self.poll().lost:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.02)
        return True


RunNode: TypeAlias = LocalNode | RemoteNode


class Fleet:
    """The nodes of a run: `nodes` that take part and up to `spares` that wait."""

    def __init__(
        self,
        local: LocalNode,
        *,
        nodes: int = 1,
        spares: int = 0,
        door: Door | None = None,
        command: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """door: entrance of other launchers. command: digest that they must join with."""
        self.local = local
        self._size, self._limit = nodes, nodes + spares
        self._door, self._command, self._clock = door, command, clock
        self._members: list[RunNode] = [local]
        self._waiting: list[RunNode] = []  # spares, and launchers that came before all nodes were there
        self._leaving: list[RunNode] = []  # told to end, and not yet gone
        self._faults: Counter[int] = Counter()

    @property
    def nodes(self) -> Sequence[RunNode]:
        """Return the nodes that take part, by number: the Ith has the ranks of place I."""
        return self._members

    def gather(self, *, stopped: Callable[[], bool], join_s: float = JOIN_S) -> None:
        """Wait until all nodes have joined; spares replace those that have not after `join_s` seconds.

        Raises RunError with the numbers of the missing nodes if too few have joined by then.
        """
        begun, reminded = self._clock(), 0.0
        while not stopped():
            self.welcome()
            missing = sorted({*range(self._size)} - {node.number for node in (*self._members, *self._waiting)})
            waited = self._clock() - begun
            if not missing or (waited >= join_s and len(self._members) + len(self._waiting) >= self._size):
                break
            names = f"node{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} of {self._size}"
            if waited >= join_s:
                raise RunError(f"the launcher of {names} has not joined within {join_s:g} s; look at its output there")
            if waited - reminded >= REMIND_S:
                reminded = waited
                log.info("waiting for the launcher of %s, for %.0f of at most %.0f s", names, waited, join_s)
            time.sleep(POLL_S)
        for node in sorted(self._waiting, key=lambda node: node.number)[: self._size - len(self._members)]:
            self._enlist(node)
        for node in self._waiting:
            _announce_spare(node)

    def welcome(self) -> None:
        """Let new launchers in, as spares; forget spares that are gone."""
        for channel, joined in [] if self._door is None else self._door.arrivals():
            node = RemoteNode(channel, joined)
            if (reason := self._refusal(node, joined.command)) != "":
                log.warning("node %d (%s) is not let in: %s", node.number, node.host, reason)
                self._let_go(node, UserError.exit_code, reason)
            else:
                self._waiting.append(node)
                if len(self._members) == self._size:
                    _announce_spare(node)
        for spare in list(self._waiting):
            if lost := spare.poll().lost:
                log.warning("%s; it was not taking part", lost)
                self._waiting.remove(spare)
        self._leaving = [node for node in self._leaving if not node.leave(0.0)]

    def replace(self, number: int, why: str) -> bool:
        """Put the spare with the lowest number in a node's place; return whether there is one."""
        self.welcome()
        if not self._waiting:
            return False
        spare = min(self._waiting, key=lambda node: node.number)
        leaver = next(node for node in self._members if node.number == number)
        self._members.remove(leaver)
        self._enlist(spare)
        log.warning("%s: node %d (%s) takes its place", why, spare.number, spare.host)
        self._let_go(leaver, RunError.exit_code, f"{why}: node {spare.number} ({spare.host}) has taken its place")
        return True

    def blame(self, number: int) -> bool:
        """Count a failure of a node's ranks; return whether a spare has taken its place."""
        self._faults[number] += 1
        node = next(node for node in self._members if node.number == number)
        why = f"the ranks of node {number} ({node.host}) have failed {self._faults[number]} times"
        return self._faults[number] >= FAULTS and self.replace(number, why)

    def finish(self, code: int, reason: str) -> None:
        """Let all launchers end, also new ones; wait at most FINISH_S."""
        arrivals = [] if self._door is None else self._door.arrivals()
        if self._door is not None:
            self._door.close()
        nodes = [*self._members, *self._waiting, *(RemoteNode(channel, joined) for channel, joined in arrivals)]
        for node in nodes:
            node.order(FINISH, code=code, line=reason)
        deadline = self._clock() + FINISH_S
        for node in (*nodes, *self._leaving):
            node.leave(deadline - self._clock())

    def _let_go(self, node: RunNode, code: int, reason: str) -> None:
        node.order(FINISH, code=code, line=reason)
        self._leaving.append(node)

    def _enlist(self, node: RunNode) -> None:
        if node in self._waiting:
            self._waiting.remove(node)
        self._members = sorted((*self._members, node), key=lambda one: one.number)

    def _refusal(self, node: RunNode, command: str) -> str:
        present = {one.number: one for one in (*self._members, *self._waiting)}
        if not 0 < node.number < self._limit:
            return f"--node-rank={node.number}: must be from 1 to {self._limit - 1}"
        if node.number in present:
            return f"--node-rank={node.number}: {present[node.number].host} has this number; each needs its own"
        if command != self._command:
            return "it was started with other options or settings than node 0; start the same command on every node"
        return ""


def _announce_spare(node: RunNode) -> None:
    log.info("node %d (%s) is a spare: it waits for one that is lost or fails", node.number, node.host)
