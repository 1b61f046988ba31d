"""Nodes that are played: who is let go, in which order, and callers that are gone again."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import cast

import pytest

from mega_rl.launcher.health import NoRecords
from mega_rl.launcher.nodes.channel import Channel
from mega_rl.launcher.nodes.fleet import Fleet
from mega_rl.launcher.nodes.messages import Joining
from mega_rl.launcher.nodes.node import LocalNode, NodeNews
from mega_rl.launcher.nodes.remote import Door
from mega_rl.launcher.ranks import Assignment, NodeRanks
from mega_rl.launcher.restarts import RestartPolicy
from mega_rl.launcher.signals import StopSignals
from mega_rl.launcher.steps import RunProgress
from mega_rl.launcher.store import listen
from mega_rl.launcher.supervisor import Supervisor
from mega_rl.launcher.watch import GenerationWatch
from tests.unit_tests.launcher.programs import wait_until


class PlayedNode:
    """A node that notes what it is asked to do."""

    host = "played"

    def __init__(self, number: int, calls: list[tuple[str, int]]) -> None:
        self.number, self._calls = number, calls

    def start(self, assignment: Assignment) -> None: ...

    def poll(self) -> NodeNews:
        return NodeNews()

    def signal(self, number: int) -> None: ...

    def end(self, *, collect: bool) -> None:
        self._calls.append(("end", self.number))

    def kill(self) -> None: ...

    def finish(self, code: int, reason: str) -> None:
        self._calls.append(("finish", self.number))

    def leave(self, within_s: float) -> bool:
        self._calls.append(("leave", self.number))
        return False


class PlayedDoor:
    """A door with callers behind it that nobody has welcomed yet."""

    def __init__(self, *arrivals: tuple[Channel, Joining]) -> None:
        self._arrivals = list(arrivals)

    def arrivals(self) -> list[tuple[Channel, Joining]]:
        arrivals, self._arrivals = self._arrivals, []
        return arrivals

    def close(self) -> None: ...


@pytest.fixture
def local() -> Iterator[LocalNode]:
    ranks = NodeRanks(("none",), variables={})
    yield LocalNode(ranks, NoRecords())
    ranks.close()


def played(local: LocalNode, numbers: int) -> tuple[Fleet, list[tuple[str, int]]]:
    """Return a fleet of this node and played ones, and what those are asked to do."""
    calls: list[tuple[str, int]] = []
    fleet = Fleet(local, nodes=1 + numbers)
    for number in range(1, 1 + numbers):
        fleet._enlist(PlayedNode(number, calls))
    return fleet, calls


def test_all_launchers_may_end_before_one_of_them_is_waited_for(local: LocalNode) -> None:
    """Else those that are gone would cost their time one after the other."""
    fleet, calls = played(local, 3)
    fleet.finish(1, "lost")
    assert calls == [("finish", 1), ("finish", 2), ("finish", 3), ("leave", 1), ("leave", 2), ("leave", 3)]


def test_a_caller_that_is_gone_at_the_end_is_nobodys_error(local: LocalNode) -> None:
    here, there = socket.socketpair()
    channel = Channel(here, b"session", is_server=True, silent_s=30.0)
    channel.close()
    there.close()
    Fleet(local, door=cast(Door, PlayedDoor((channel, Joining(1, "h", "c"))))).finish(0, "")


def test_ranks_of_other_nodes_are_ended_while_stacks_of_this_one_are_written(
    local: LocalNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, calls = played(local, 2)
    monkeypatch.setattr(LocalNode, "end", lambda self, *, collect: calls.append(("end", 0)))
    with StopSignals(()) as stop:
        supervisor = Supervisor(
            fleet, nproc=1, master_addr="127.0.0.1", health=NoRecords(),
            progress=RunProgress(None, NoRecords()), restarts=RestartPolicy(0), stop=stop,
        )  # fmt: skip
        watch = GenerationWatch(3, time.monotonic)
        watch.fail("a rank is stuck")
        supervisor._carry_out(watch)
    assert calls == [("end", 2), ("end", 1), ("end", 0)]


class Unsteady:
    """A listener whose first call fails, as of a caller that has hung up before it was taken."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener, self._failed = listener, False

    def accept(self) -> tuple[socket.socket, object]:
        if not self._failed:
            self._failed = True
            raise ConnectionAbortedError(103, "Software caused connection abort")
        return self._listener.accept()

    def __getattr__(self, name: str) -> object:
        return getattr(self._listener, name)


def test_a_call_that_cannot_be_taken_does_not_close_the_door(caplog: pytest.LogCaptureFixture) -> None:
    with listen("127.0.0.1") as listener:
        door = Door(cast(socket.socket, Unsteady(listener)), b"k" * 32)
        with socket.create_connection(listener.getsockname()[:2], timeout=60.0) as caller:
            assert caller.recv(8) == b"mega_rl "
        door.close()
    wait_until(lambda: "could not be taken: Software caused connection abort" in caplog.text)
