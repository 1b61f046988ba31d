"""The driver's decisions, with nodes that are played; real ones are in tests/clusters/ray."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping, Sequence

import pytest

from mega_rl.errors import RunError, UserError
from mega_rl.operations.schedulers.options import RecipeFacts, variables
from mega_rl.operations.schedulers.ray.driver import GIVE_UP_S, KEY, RayRun, drive
from mega_rl.operations.schedulers.ray.node import NodeOutput
from mega_rl.operations.schedulers.ray.placement import NodeLost

TERM, KILL = signal.SIGTERM, signal.SIGKILL
RUN = RayRun(nodes=2, nproc_per_node=4, node_restarts=2, max_restarts=1, env=["A=1"])
FACTS = RecipeFacts(
    recipe="r.yaml", text="", overrides=["a=1"], run_dir="/runs/a", resume="never", device="cpu", saves=True
)


class Clock:
    """Seconds that pass as nodes are polled."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class PlayedNodes:
    """Two nodes that follow a script: seconds and what each says then, a text for a loss, a number for an exit code."""

    def __init__(self, clock: Clock, script: Mapping[float, tuple[int, int | str]], saved: Sequence[str] = ()) -> None:
        self.addresses = ["10.0.0.1", "10.0.0.2"]
        self._clock, self._begin, self._script, self._saved = clock, clock.now, dict(script), saved
        self.commands: list[Sequence[str]] = []
        self.environment: Mapping[str, str] = {}
        self.waits_for = ""
        self.signals: list[tuple[float, int]] = []
        self.removed = False

    def prepare(self, run_dir: str) -> tuple[int, Sequence[str]]:
        assert run_dir == "/runs/a"
        return 4711, self._saved

    def start(self, commands: Sequence[Sequence[str]], environment: Mapping[str, str], wait_for_lock_of: str) -> None:
        self.commands, self.environment, self.waits_for = list(commands), environment, wait_for_lock_of

    def poll(self, wait_s: float) -> Sequence[tuple[int, NodeOutput]]:
        self._clock.now += wait_s
        said = []
        for when in [when for when in sorted(self._script) if when <= self._clock.now - self._begin]:
            node, what = self._script.pop(when)
            said.append((node, NodeOutput(lost=what) if isinstance(what, str) else NodeOutput(("end",), what)))
        return said

    def signal(self, number: int) -> None:
        self.signals.append((self._clock.now - self._begin, number))

    def remove(self) -> None:
        self.removed = True


def driven(*scripts: Mapping[float, tuple[int, int | str]], saved: Sequence[Sequence[str]] = ((), (), ())) -> tuple:
    clock = Clock()
    placements: list[PlayedNodes] = []
    lines: list[str] = []

    def place(stop: object) -> PlayedNodes:
        placements.append(PlayedNodes(clock, scripts[len(placements)], saved[len(placements)]))
        return placements[-1]

    try:
        return drive(RUN, FACTS, place, write=lines.append, clock=clock), placements, lines
    finally:
        assert all(one.removed for one in placements)


def test_a_run_ends_with_its_nodes() -> None:
    code, (nodes,), lines = driven({3.0: (0, 0), 500.0: (1, 0)})
    assert code == 0
    assert nodes.signals == []  # a node may end long before another
    assert lines == ["[node 0] end", "[node 1] end"]


def test_commands_of_nodes_differ_only_in_their_rank() -> None:
    _, (nodes,), _ = driven({1.0: (0, 0), 2.0: (1, 0)})
    first, second = (" ".join(command) for command in nodes.commands)
    assert first == (
        "--nnodes 2 --nproc-per-node 4 --master-addr 10.0.0.1 --master-port 4711 --max-restarts 1 --node-rank 0 "
        "--config r.yaml a=1"
    )
    assert second == first.replace("--node-rank 0", "--node-rank 1")
    assert re.fullmatch("[0-9a-f]{64}", nodes.environment[KEY])
    assert nodes.environment["A"] == "1"


@pytest.mark.parametrize("codes", [(2, 1), (1, 2)])
def test_mistake_is_not_tried_again(codes: tuple[int, int]) -> None:
    code, placements, _ = driven({1.0: (0, codes[0]), 2.0: (1, codes[1])})
    assert (code, len(placements)) == (2, 1)


def test_failed_run_is_not_tried_again() -> None:
    code, placements, _ = driven({1.0: (1, 1), 2.0: (0, 143)})
    assert (code, len(placements)) == (1, 1)


def test_run_is_placed_again_after_a_lost_node() -> None:
    code, (first, second), _ = driven({5.0: (1, "gone"), 40.0: (0, -KILL)}, {1.0: (0, 0), 2.0: (1, 0)})
    assert code == 0
    assert first.signals == [(5.0, TERM), (35.0, KILL)]
    assert (first.waits_for, second.waits_for) == ("", "/runs/a")
    assert first.environment[KEY] != second.environment[KEY]


@pytest.mark.parametrize("end", ["gone", -KILL, -39, 143])
def test_some_ends_count_as_a_lost_node(end: int | str) -> None:
    code, placements, _ = driven({5.0: (1, end), 6.0: (0, 143)}, {1.0: (0, 0), 2.0: (1, 0)})
    assert (code, len(placements)) == (0, 2)


def test_restart_resumes_only_what_the_run_has_saved() -> None:
    lost = {5.0: (1, "gone"), 6.0: (0, 1)}
    old, new = ("step_000009@1",), ("step_000003@2",)
    _, placements, _ = driven(lost, lost, {1.0: (0, 0), 2.0: (1, 0)}, saved=(old, old, new))
    assert ["checkpoint.resume=auto" in nodes.commands[0] for nodes in placements] == [False, False, True]


def test_restarts_are_counted() -> None:
    lost = {5.0: (1, "10.0.0.2: power cut"), 6.0: (0, 1)}
    with pytest.raises(RunError, match=r"node 1 is lost: 10.0.0.2: power cut; --node-restarts=2 are used up"):
        driven(lost, lost, lost)


def test_silent_node_is_given_up() -> None:
    code, (first, _), _ = driven({5.0: (1, 1)}, {1.0: (0, 0), 2.0: (1, 0)})
    assert code == 0
    assert first.signals == [(35.0, TERM), (405.0, KILL)]
    assert first._clock.now > 405 + GIVE_UP_S


def test_signals_reach_the_nodes_and_end_the_run() -> None:
    clock, nodes = Clock(), None

    class Stopped(PlayedNodes):
        def signal(self, number: int) -> None:
            super().signal(number)
            self._script = {clock.now + 1: (0, 128 + number), clock.now + 2: (1, 128 + number)}

    def place(stop: object) -> PlayedNodes:
        nonlocal nodes
        nodes = Stopped(clock, {})
        os.kill(os.getpid(), signal.SIGUSR1)
        return nodes

    assert drive(RUN, FACTS, place, write=lambda line: None, clock=clock) == 128 + signal.SIGUSR1
    assert nodes is not None
    assert nodes.signals[0] == (0.0, signal.SIGUSR1)


def test_node_lost_before_its_start_is_placed_again() -> None:
    class Gone(PlayedNodes):
        def prepare(self, run_dir: str) -> tuple[int, Sequence[str]]:
            raise NodeLost("node 0 is lost: 10.0.0.1: gone")

    clock = Clock()
    placements = [Gone(clock, {}), PlayedNodes(clock, {1.0: (0, 0), 2.0: (1, 0)})]
    left = iter(placements)
    assert drive(RUN, FACTS, lambda stop: next(left), write=lambda line: None, clock=clock) == 0
    assert all(one.removed for one in placements)


def test_variables_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERE", "1")
    assert variables(["HERE", "THERE=a=b", "EMPTY="]) == {"HERE": "1", "THERE": "a=b", "EMPTY": ""}
    with pytest.raises(UserError, match="--env=MISSING: has no value here"):
        variables(["MISSING"])
    with pytest.raises(UserError, match="is not the name of a variable"):
        variables(["A B=1"])
