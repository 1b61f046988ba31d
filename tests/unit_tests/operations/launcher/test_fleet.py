"""Nodes that take part in a run: in which order they are asked to end, and callers that are gone again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from mega_rl.operations.launcher.nodes import Fleet, LocalNode, NodeNews, RemoteNode
from mega_rl.operations.launcher.outcome import GenerationState, RestartPolicy
from mega_rl.operations.launcher.ranks import NodeRanks
from mega_rl.operations.launcher.run_health import RunHealth, RunProgress
from mega_rl.operations.launcher.signals import StopSignals
from mega_rl.operations.launcher.supervisor import Supervisor


class PlayedNode:
    """A node that records the orders it gets."""

    host = "played"

    def __init__(self, number: int, calls: list[tuple[str, int]]) -> None:
        self.number, self._calls = number, calls

    def order(self, kind: str, **values: object) -> None:
        self._calls.append((kind, self.number))

    def poll(self) -> NodeNews:
        return NodeNews()

    def leave(self, within_s: float) -> bool:
        self._calls.append(("leave", self.number))
        return False


@pytest.fixture
def local(tmp_path: Path) -> Iterator[LocalNode]:
    node = LocalNode(NodeRanks(("none",), variables={}), RunHealth(tmp_path))
    yield node
    node.ranks.close()


@pytest.fixture
def played(local: LocalNode) -> tuple[Fleet, list[tuple[str, int]]]:
    """A fleet of this node and two played ones, and their orders."""
    calls: list[tuple[str, int]] = []
    fleet = Fleet(local, nodes=3)
    for number in (1, 2):
        fleet._enlist(cast(RemoteNode, PlayedNode(number, calls)))
    return fleet, calls


def test_all_launchers_may_end_before_the_wait(played: tuple[Fleet, list[tuple[str, int]]]) -> None:
    fleet, calls = played
    fleet.finish(1, "lost")
    assert calls == [("finish", 1), ("finish", 2), ("leave", 1), ("leave", 2)]


def test_other_nodes_end_their_ranks_before_this_one_writes_stacks(
    played: tuple[Fleet, list[tuple[str, int]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, calls = played
    monkeypatch.setattr(LocalNode, "order", lambda self, kind, **values: calls.append((kind, 0)))
    health = RunHealth(tmp_path)
    with StopSignals(()) as stop:
        supervisor = Supervisor(
            fleet, nproc=1, master_addr="127.0.0.1", health=health, restarts=RestartPolicy(0), stop=stop,
            progress=RunProgress(tmp_path, health, lambda run_dir: ("", "")),
        )  # fmt: skip
        state = GenerationState(3, time.monotonic)
        state.fail("a rank is stuck")
        supervisor._carry_out(state)
    assert calls == [("end", 2), ("end", 1), ("end", 0)]
