"""Nodes that take part in a run and those that wait as spares: who joins, who is replaced."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

from mega_rl.errors import RunError, UserError
from mega_rl.launcher.nodes.node import LocalNode, RunNode
from mega_rl.launcher.nodes.remote import Door, RemoteNode

log = logging.getLogger(__name__)

JOIN_S = 600.0  # images are pulled, disks are mounted
REMIND_S = 30.0
POLL_S = 0.05
FINISH_S = 5.0  # until launchers that were told to end have hung up
FAULTS = 2  # of a node's ranks, after which a spare takes its place


class Fleet:
    """Nodes of a run, by their numbers: of `nodes` that take part and up to `spares` that wait."""

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
        """door: of other nodes' launchers. command: digest that they must have, see `Joining`."""
        self.local = local
        self._size, self._limit = nodes, nodes + spares
        self._door, self._command, self._clock = door, command, clock
        self._members: list[RunNode] = [local]
        self._waiting: list[RunNode] = []  # spares, and whoever came before all nodes were there
        self._leaving: list[RunNode] = []  # that were let go, and have not hung up
        self._faults: Counter[int] = Counter()

    @property
    def nodes(self) -> Sequence[RunNode]:
        """Return the nodes that take part, by number: node I of them has the ranks of place I."""
        return self._members

    def gather(self, *, stopped: Callable[[], bool], join_s: float = JOIN_S) -> None:
        """Wait until all nodes have joined; a spare takes the place of one that has not after `join_s` seconds.

        Raises RunError when too few have by then, with the numbers of those that are missing.
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
        """Let those in who have called, as spares; forget spares that are gone."""
        for channel, joined in [] if self._door is None else self._door.arrivals():
            node = RemoteNode(channel, joined)
            present = {one.number: one for one in (*self._members, *self._waiting)}
            if (reason := self._refusal(node, joined.command, present)) != "":
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
        """Put a spare in a node's place, in the order of numbers, and say so; return whether there is one."""
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
        """Note a failure of a node's ranks; return whether a spare has taken the node's place because of it."""
        self._faults[number] += 1
        node = next(node for node in self._members if node.number == number)
        why = f"the ranks of node {number} ({node.host}) have failed {self._faults[number]} times"
        return self._faults[number] >= FAULTS and self.replace(number, why)

    def finish(self, code: int, reason: str) -> None:
        """Let all launchers end, those that have just called as well, and wait for that, FINISH_S at most."""
        arrivals = []
        if self._door is not None:
            self._door.close()
            arrivals = self._door.arrivals()
        nodes = [*self._members, *self._waiting, *(RemoteNode(channel, joined) for channel, joined in arrivals)]
        for node in nodes:
            node.finish(code, reason)
        deadline = self._clock() + FINISH_S
        for node in (*nodes, *self._leaving):
            node.leave(deadline - self._clock())

    def _let_go(self, node: RunNode, code: int, reason: str) -> None:
        node.finish(code, reason)
        self._leaving.append(node)

    def _enlist(self, node: RunNode) -> None:
        if node in self._waiting:
            self._waiting.remove(node)
        self._members = sorted((*self._members, node), key=lambda one: one.number)

    def _refusal(self, node: RunNode, command: str, present: dict[int, RunNode]) -> str:
        if not 0 < node.number < self._limit:
            return f"--node-rank={node.number}: must be from 1 to {self._limit - 1}"
        if node.number in present:
            return f"--node-rank={node.number}: {present[node.number].host} has this number; each needs its own"
        if command != self._command:
            return "it was started with other options or settings than node 0; start the same command on every node"
        return ""


def _announce_spare(node: RunNode) -> None:
    log.info("node %d (%s) is a spare: it waits for one that is lost or fails", node.number, node.host)
