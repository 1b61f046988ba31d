"""Runs on Ray without Ray: the driver's decisions with nodes that are played, and a node's launcher as a process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from unittest.mock import patch

import pytest

from mega_rl.disk import lock_file
from mega_rl.errors import RunError, UserError
from mega_rl.operations.schedulers import RecipeFacts, ray, variables
from mega_rl.operations.schedulers.ray import GIVE_UP_S, KEY, NodeLauncher, NodeLost, Output, RayRun, drive
from tests.unit_tests.operations.launcher.programs import is_gone, wait_until

TERM, KILL = signal.SIGTERM, signal.SIGKILL
WAIT_S = 60.0
RUN = RayRun(nodes=2, nproc_per_node=4, node_restarts=2, max_restarts=1, env=["A=1"])
FACTS = RecipeFacts(
    recipe="r.yaml", text="", overrides=["a=1"], run_dir="/runs/a", resume="never", device="cpu", saves=True
)
ENDS_WELL = {1.0: (0, 0), 2.0: (1, 0)}


class Clock:
    """Seconds that pass as nodes are polled."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class PlayedNodes:
    """Two nodes that follow a script: seconds and how each ends then, a text for a loss, a number for an exit code."""

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

    def poll(self, wait_s: float) -> list[Output]:
        self._clock.now += wait_s
        now = [when for when in sorted(self._script) if when <= self._clock.now - self._begin]
        ends = [self._script.pop(when) for when in now]
        return [(node, [] if isinstance(end, str) else ["end"], end) for node, end in ends]

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
        with patch.object(ray, "monotonic", clock):
            return drive(RUN, FACTS, place, write=lines.append), placements, lines
    finally:
        assert all(one.removed for one in placements)


def test_a_run_ends_with_its_nodes() -> None:
    code, (nodes,), lines = driven({3.0: (0, 0), 500.0: (1, 0)})
    assert code == 0
    assert nodes.signals == []  # a node may end long before another
    assert lines == ["[node 0] end", "[node 1] end"]
    first, second = (" ".join(command) for command in nodes.commands)
    assert first == (
        "--nnodes 2 --nproc-per-node 4 --max-restarts 1 --master-addr 10.0.0.1 --master-port 4711 --node-rank 0 "
        "--config r.yaml a=1"
    )
    assert second == first.replace("--node-rank 0", "--node-rank 1")
    assert re.fullmatch("[0-9a-f]{64}", nodes.environment[KEY])
    assert nodes.environment["A"] == "1"


@pytest.mark.parametrize(
    ("script", "code"),
    [({1.0: (0, 2), 2.0: (1, 1)}, 2), ({1.0: (0, 1), 2.0: (1, 2)}, 2), ({1.0: (1, 1), 2.0: (0, 143)}, 1)],
    ids=["mistake", "mistake of the other", "failed run"],
)
def test_some_ends_are_not_tried_again(script: Mapping[float, tuple[int, int]], code: int) -> None:
    assert driven(script)[0] == code


def test_run_is_placed_again_after_a_lost_node() -> None:
    code, (first, second), _ = driven({5.0: (1, "gone"), 40.0: (0, "killed")}, ENDS_WELL)
    assert code == 0
    assert first.signals == [(5.0, TERM), (35.0, KILL)]
    assert (first.waits_for, second.waits_for) == ("", "/runs/a")
    assert first.environment[KEY] != second.environment[KEY]


def test_node_told_to_end_counts_as_lost() -> None:
    code, placements, _ = driven({5.0: (1, 143), 6.0: (0, 143)}, ENDS_WELL)
    assert (code, len(placements)) == (0, 2)


def test_restart_resumes_only_what_the_run_has_saved() -> None:
    lost = {5.0: (1, "gone"), 6.0: (0, 1)}
    old, new = ("step_000009@1",), ("step_000003@2",)
    _, placements, _ = driven(lost, lost, ENDS_WELL, saved=(old, old, new))
    assert ["checkpoint.resume=auto" in nodes.commands[0] for nodes in placements] == [False, False, True]


def test_restarts_are_counted() -> None:
    lost = {5.0: (1, "10.0.0.2: power cut"), 6.0: (0, 1)}
    with pytest.raises(RunError, match=r"node 1 is lost: 10.0.0.2: power cut; --node-restarts=2 are used up"):
        driven(lost, lost, lost)


def test_silent_node_is_given_up() -> None:
    code, (first, _), _ = driven({5.0: (1, 1)}, ENDS_WELL)
    assert code == 0
    assert first.signals == [(35.0, TERM), (905.0, KILL)]
    assert first._clock.now > 905 + GIVE_UP_S


def test_signals_reach_the_nodes_and_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
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

    monkeypatch.setattr(ray, "monotonic", clock)
    assert drive(RUN, FACTS, place, write=lambda line: None) == 128 + signal.SIGUSR1
    assert nodes is not None
    assert nodes.signals[0] == (0.0, signal.SIGUSR1)


def test_node_lost_before_its_start_is_placed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(PlayedNodes):
        def prepare(self, run_dir: str) -> tuple[int, Sequence[str]]:
            raise NodeLost("node 0 is lost: 10.0.0.1: gone")

    clock = Clock()
    placements = [Gone(clock, {}), PlayedNodes(clock, ENDS_WELL)]
    left = iter(placements)
    monkeypatch.setattr(ray, "monotonic", clock)
    assert drive(RUN, FACTS, lambda stop: next(left), write=lambda line: None) == 0
    assert all(one.removed for one in placements)


def test_variables_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERE", "1")
    assert variables(["HERE", "THERE=a=b", "EMPTY="]) == {"HERE": "1", "THERE": "a=b", "EMPTY": ""}
    for text in ("MISSING", "A B=1"):
        with pytest.raises(UserError, match="--env="):
            variables([text])


def launcher(program: str) -> NodeLauncher:
    return NodeLauncher((sys.executable, "-S", "-u", "-c", textwrap.dedent(program)))


def lines_of(said: Iterator[list[str] | int]) -> Iterator[str | int]:
    for one in said:
        yield from one if isinstance(one, list) else [one]


def test_output_and_exit_code_come_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    node = launcher("""
        import os, sys
        print(sys.argv[1], os.getcwd(), os.environ["A"], os.environ.get("OMP_NUM_THREADS"), flush=True)
        for i in range(2000): print(i)
        sys.exit(3)
    """)
    first, *rest = lines_of(node.run(["--x"], {"A": "1"}, str(tmp_path)))
    assert first == f"--x {tmp_path} 1 None"  # what Ray sets for its actor is not for the ranks
    assert rest == [*map(str, range(2000)), 3]


def test_signals_reach_the_launcher_and_its_processes(tmp_path: Path) -> None:
    node = launcher("""
        import signal, subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid
        signal.signal(signal.SIGUSR1, lambda number, frame: print("got it"))
        print(child)
        while True: signal.pause()
    """)
    said = lines_of(node.run([], {}, str(tmp_path)))
    child = int(next(said))
    node.signal(signal.SIGUSR1)
    assert next(said) == "got it"
    node.signal(KILL)
    assert list(said) == [-KILL]
    wait_until(lambda: is_gone(child))


def test_launcher_ends_with_its_killed_actor(tmp_path: Path) -> None:
    actor = f"""
        import os, sys
        from mega_rl.operations.schedulers.ray import NodeLauncher
        node = NodeLauncher((sys.executable, "-S", "-u", "-c", "import os, time; print(os.getpid()); time.sleep(600)"))
        for lines in node.run([], {{}}, {str(tmp_path)!r}): print(lines[0], flush=True)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(actor)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.kill()
    wait_until(lambda: is_gone(pid))


@pytest.mark.parametrize("stopped", [False, True])
def test_launcher_waits_for_the_lock(tmp_path: Path, stopped: bool) -> None:
    """Or for a signal, after which it does not start."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    held = lock_file(folder / ".lock")
    node, said = launcher("print('started')"), []
    thread = threading.Thread(target=lambda: said.extend(lines_of(node.run([], {}, str(tmp_path), str(tmp_path)))))
    thread.start()
    time.sleep(0.5)
    assert said == []
    node.signal(TERM) if stopped else os.close(held)
    thread.join(WAIT_S)
    assert said == ([143] if stopped else ["started", 0])
