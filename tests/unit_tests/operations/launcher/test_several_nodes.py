"""Launchers of several nodes, all on this machine's loopback interface, with ranks that are small programs."""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from mega_rl.operations.launcher.channel import MAGIC
from tests.unit_tests.operations.launcher.programs import Started, free_port, is_gone, start, wait_until

KEY = "0123456789abcdef0123456789abcdef"
Start = Callable[..., Started]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Start]:
    """Start the launcher of a node; what is left is killed."""
    port = free_port()
    started: list[Started] = []

    def start_node(number: int, program: str, **settings: object) -> Started:
        options: dict[str, object] = {"nnodes": 2, "nproc_per_node": 1, "key": KEY, "node_rank": number}
        options |= {"master_addr": "127.0.0.1", "master_port": port}
        started.append(start(tmp_path, program, **(options | settings)))  # type: ignore[arg-type]
        return started[-1]

    start_node.port = port  # type: ignore[attr-defined]
    yield start_node
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
        one.process.wait()


SHOW = """
    names = ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "GLOO_SOCKET_IFNAME")
    Path(f"shown.{rank}.{generation}").write_text(" ".join(os.environ[name] for name in names))
"""


def test_ranks_are_numbered_by_their_nodes(node: Start, tmp_path: Path) -> None:
    """In whatever order the launchers start."""
    second = node(1, SHOW, nproc_per_node=2)
    first = node(0, SHOW, nproc_per_node=2)
    assert first.end()[0] == 0
    assert second.end()[0] == 0
    shown = [(tmp_path / f"shown.{rank}.0").read_text() for rank in range(4)]
    assert shown == [f"4 {rank % 2} 2 {rank // 2} 127.0.0.1 lo" for rank in range(4)]


def test_failure_on_one_node_restarts_all_ranks(node: Start, tmp_path: Path) -> None:
    program = """
        reached("up")
        if generation == 0 and rank == 1: wait_for("up", 0); save(3); os.kill(os.getpid(), 9)
        if generation == 0: time.sleep(600)
    """
    first, second = node(0, program, max_restarts=3), node(1, program, max_restarts=3)
    code, errors = first.end()
    assert code == 0, errors
    assert second.end()[0] == 0
    assert errors.count("was killed by SIGKILL: perhaps the machine is out of memory; after step 3: restart 1 of") == 1
    assert all((tmp_path / f"up.{rank}.1").exists() for rank in range(2))


@pytest.mark.parametrize(("end", "code"), [("sys.exit(2)", 2), ("os.kill(os.getpid(), 11)", 139)])
def test_all_launchers_end_with_the_first_code(node: Start, end: str, code: int) -> None:
    program = f"""
        reached("up")
        if rank == 1: wait_for("up", 0); {end}
        time.sleep(600)
    """
    launchers = [node(number, program) for number in range(2)]
    assert [launcher.end()[0] for launcher in launchers] == [code, code]


@pytest.mark.parametrize("number", [0, 1])
def test_signal_to_one_launcher_ends_all(node: Start, number: int) -> None:
    """Its own ranks get it; the ranks agree, as those of a training do."""
    program = """
        def stop(*_): Path("stop").write_text("")
        signal.signal(signal.SIGTERM, stop)
        reached("up")
        while not Path("stop").exists(): time.sleep(0.005)
        sys.exit(143)
    """
    launchers = [node(one, program, max_restarts=3) for one in range(2)]
    for rank in range(2):
        launchers[0].reached("up", rank)
    launchers[number].process.send_signal(signal.SIGTERM)
    assert [launcher.end()[0] for launcher in launchers] == [143, 143]


WAITS = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)); reached('up'); time.sleep(600)"


@pytest.mark.parametrize(
    ("number", "how"),
    [(signal.SIGKILL, "its connection is closed"), (signal.SIGSTOP, "nothing was heard of it for 2 s")],
    ids=["killed", "silent"],
)
def test_lost_node_ends_the_run_with_its_name(node: Start, number: signal.Signals, how: str) -> None:
    first, second = (node(one, WAITS, max_restarts=3, silent_s=2.0) for one in range(2))
    pid = first.reached("up", 1)
    second.process.send_signal(number)
    code, errors = first.end()
    assert code == 1
    assert f"error: node 1 ({socket.gethostname()}) is lost: {how}" in errors
    assert "start the run again, on other nodes" in errors
    if number == signal.SIGKILL:
        wait_until(lambda: is_gone(pid))  # the kernel ends it with its launcher


def test_nodes_save_and_end_without_node_0(node: Start) -> None:
    first, second = node(0, WAITS), node(1, WAITS)
    pids = [first.reached("up", rank) for rank in range(2)]
    first.process.kill()
    code, errors = second.end()
    assert code == 1
    assert errors.splitlines()[-1] == "error: the launcher of node 0 is lost: its connection is closed"
    wait_until(lambda: all(map(is_gone, pids)))


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "error: the launcher of nodes 1, 2 of 3 has not joined within 0.3 s; look at its output there"),
        (
            1,
            r"error: the launcher of node 0 did not answer at 127.0.0.1, port \d+, within 0.3 s \(Connection refused\)",
        ),
    ],
)
def test_missing_launchers_are_named(node: Start, number: int, words: str) -> None:
    code, errors = node(number, WAITS, nnodes=3, join_s=0.3).end()
    assert code == 1
    assert re.search(words, errors), errors


def test_signal_ends_the_wait_for_others(node: Start) -> None:
    first = node(0, WAITS)
    wait_until(lambda: can_connect(node.port), first)  # type: ignore[attr-defined]
    first.process.send_signal(signal.SIGTERM)
    assert first.end()[0] == 143
    second = node(1, WAITS)
    second.process.send_signal(signal.SIGTERM)
    assert second.end()[0] in (143, -15)  # it may not have got as far as its handlers


def test_key_is_in_no_command_line(node: Start) -> None:
    first, second = node(0, WAITS), node(1, WAITS)
    pids = [first.reached("up", rank) for rank in range(2)]
    pids += [child.pid for one in (first, second) for child in psutil.Process(one.process.pid).children()]
    for pid in (*pids, first.process.pid, second.process.pid):
        assert KEY.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert all(KEY.encode() not in Path(f"/proc/{pid}/environ").read_bytes() for pid in pids)
    first.process.send_signal(signal.SIGTERM)
    assert second.end()[0] == 143


def can_connect(port: int) -> bool:
    """Return whether a launcher greets at a port."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection:
            return connection.recv(len(MAGIC)) == MAGIC
    except OSError:
        return False
