"""Nodes of a run as the launcher of node 0 sees them: its own, and in `member` those of other launchers."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mega_rl.launcher.health import RankHealth
from mega_rl.launcher.ranks import Assignment, NodeRanks, RankEnd
from mega_rl.launcher.store import RankStore


@dataclass(frozen=True)
class NodeNews:
    """Events of a node since the last time it was asked.

    stopped_by: signal that its launcher got and has handed on. lost: why the launcher is gone; its ranks are, too.
    """

    ends: Sequence[RankEnd] = ()
    stopped_by: int = 0
    lost: str = ""


class RunNode(Protocol):
    """A launcher and its ranks. Calls return at once; what comes of them is in `poll`."""

    number: int  # its --node-rank
    host: str

    def start(self, assignment: Assignment) -> None:
        """Start ranks."""

    def poll(self) -> NodeNews:
        """Return what has happened; of a lost node no more than that it is lost, each time."""

    def signal(self, number: int) -> None:
        """Send a signal to the ranks."""

    def end(self, *, collect: bool) -> None:
        """End the ranks of a run that has failed. collect: write stacks before, see `RankHealth`."""

    def kill(self) -> None:
        """Kill the ranks."""

    def finish(self, code: int, reason: str) -> None:
        """Let the launcher end with this exit code and, unless empty, reason."""

    def leave(self, within_s: float) -> bool:
        """Return whether the launcher has hung up after `finish`, waiting for that if asked to."""


class LocalNode:
    """Node 0, whose launcher is this process, and the store of all ranks."""

    number = 0

    def __init__(self, ranks: NodeRanks, health: RankHealth) -> None:
        self.host = socket.gethostname()
        self._ranks, self._health = ranks, health
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

    def start(self, assignment: Assignment) -> None:
        """Start ranks."""
        self._ranks.start(assignment, lifeline=None if self._store is None else self._store.lifeline)

    def poll(self) -> NodeNews:
        """Return the ends of ranks."""
        return NodeNews(self._ranks.poll())

    def signal(self, number: int) -> None:
        """Send a signal to the ranks."""
        self._ranks.signal(number)

    def end(self, *, collect: bool) -> None:
        """End the ranks."""
        if collect and self._ranks.processes:
            self._health.collect(self._ranks.processes)
        self._ranks.end()

    def kill(self) -> None:
        """Kill the ranks."""
        self._ranks.kill()

    def finish(self, code: int, reason: str) -> None:
        """Do nothing: this is the launcher that says so."""

    def leave(self, within_s: float) -> bool:
        """Return True."""
        return True
