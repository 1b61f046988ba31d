"""Servers on several hosts: their arguments, the line of life between nodes, starts, deaths and restarts."""

from __future__ import annotations

import os
import queue
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from mega_rl.errors import UserError
from mega_rl.rollout.sglang.server.nodes import Node, end_together
from mega_rl.rollout.sglang.server.process import ServerProcess, ServerSettings, arguments, environment
from tests.helpers.distributed import run_ranks
from tests.unit_tests.rollout.sglang.nodes_on_ranks import lives, meet

SETTINGS = ServerSettings(Path("/some/checkpoint"), host="10.0.0.7", tp=16, nodes=2)
MEETING = Node(0, "10.0.0.7", 41001, 41002)


def options(settings: ServerSettings) -> dict[str, str]:
    words = arguments(settings, 31001, MEETING)
    return dict(pairwise(words))


def test_arguments_of_a_node_have_number_and_meeting() -> None:
    first, second = options(SETTINGS), options(replace(SETTINGS, node=1, host="10.0.0.8"))
    for node, given in enumerate((first, second)):
        assert given["--nnodes"] == "2"
        assert given["--node-rank"] == str(node)
        assert given["--tp-size"] == "16"
        assert given["--dist-init-addr"] == "10.0.0.7:41001"
    assert first["--host"] == "10.0.0.7"
    assert second["--host"] == "127.0.0.1", "only its own host asks after its health"
    assert "--nnodes" not in arguments(replace(SETTINGS, nodes=1), 31001)
    assert Node(0, "fd00::7", 1, 2).init_address == "[fd00::7]:1"


def test_a_node_talks_over_its_interface(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "mine")
    monkeypatch.setattr("mega_rl.rollout.sglang.server.process.interface_of", {"10.0.0.8": "ib0"}.get)
    given = environment(replace(SETTINGS, node=1, host="10.0.0.8"), scratch=tmp_path, packages=None)
    assert (given["SGLANG_HOST_IP"], given["GLOO_SOCKET_IFNAME"], given["NCCL_SOCKET_IFNAME"]) == (
        "10.0.0.8", "ib0", "mine",
    )  # fmt: skip
    assert len(given["SGLANG_CPU_OMP_THREADS_BIND"].split("|")) == 8, "of its own ranks"


@pytest.mark.parametrize("host", ["no-such-interface0", "192.0.2.99"])
def test_foreign_address_is_refused(tmp_path: Path, host: str) -> None:
    process = ServerProcess(replace(SETTINGS, host=host), index=0, folder=tmp_path)
    with pytest.raises(UserError, match=rf"rollout\.sglang\.server\.host='{host}' is neither .*legal: .*\blo\b"):
        process.reserve_meeting()


# ---------------------------------------------------------------------------------------------------------------------
# The line of life, between threads


@pytest.fixture
def first(tmp_path: Path) -> Iterator[tuple[Node, queue.Queue[str]]]:
    """A meeting at this machine's loopback, and what its first node hears of others' ends."""
    process = ServerProcess(ServerSettings(Path("/m"), tp=2, nodes=2), index=0, folder=tmp_path)
    meeting = process.reserve_meeting()
    heard: queue.Queue[str] = queue.Queue()
    end_together(meeting, heard.put)
    yield meeting, heard
    process.stop()


def connected(meeting: Node) -> socket.socket:
    for _ in range(500):
        try:
            return socket.create_connection((meeting.address, meeting.life_port), timeout=10)
        except ConnectionRefusedError:  # its thread has not come so far
            time.sleep(0.02)
    raise AssertionError("nobody listens")


def test_the_first_node_hears_of_another_nodes_end(first: Any) -> None:
    meeting, heard = first
    with connected(meeting) as connection:
        connection.sendall(replace(meeting, number=3).hello())
        with pytest.raises(queue.Empty):
            heard.get(timeout=0.3)
    assert heard.get(timeout=10) == "node 3 at 127.0.0.1 has ended"


@pytest.mark.parametrize(
    "hello", [b"", b"GET / HTTP/1.1".ljust(64), (b"0" * 48 + b" 1").ljust(64)], ids=["none", "HTTP", "secret"]
)
def test_a_stranger_ends_nothing(first: Any, hello: bytes) -> None:
    meeting, heard = first
    with connected(meeting) as connection:
        connection.sendall(hello)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b"", "it is hung up on"
    with pytest.raises(queue.Empty):
        heard.get(timeout=0.3)


# ---------------------------------------------------------------------------------------------------------------------
# Two ranks that stand for two hosts


def test_ranks_meet_at_the_first_nodes_address_only(tmp_path: Path) -> None:
    process = ServerProcess(ServerSettings(Path("/m"), tp=2, nodes=2), index=0, folder=tmp_path)
    sums = run_ranks(2, meet, process.reserve_meeting(), device="cpu")
    process.stop()
    assert [total for total, _ in sums] == [3.0, 3.0]
    assert {address for _, listens in sums for address in listens} == {"127.0.0.1"}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of the two ranks saw."""
    return run_ranks(2, lives, tmp_path_factory.mktemp("nodes"), device="cpu", timeout_s=120)


def test_each_host_starts_its_node_of_servers(seen: list[dict[str, Any]]) -> None:
    one, other = (each["life"] for each in seen)
    assert one["names"] == ["SGLang server 0, node 0 of 2", "SGLang server 1, node 0 of 2"]
    assert other["names"] == ["SGLang server 0, node 1 of 2", "SGLang server 1, node 1 of 2"]
    for index in (0, 1):
        first, second = one["logs"][index], other["logs"][index]
        assert first.startswith("node 0 of 2 tp 2 meets at 127.0.0.1:")
        assert second == first.replace("node 0", "node 1"), "both meet at one address"
    assert one["logs"][0] != one["logs"][1], "and each server at its own"


def test_dead_node_ends_its_server_and_is_named(seen: list[dict[str, Any]]) -> None:
    one, other = (each["life"] for each in seen)
    assert one["seconds"] < 5
    assert one["reason"] == "The server ends: node 1 at 127.0.0.1 has ended"
    assert one["warnings"] == ["starting SGLang server 1 again"]
    assert one["again"] == other["again"]
    assert one["again"][0] == one["endpoints"][0]
    assert one["again"][1] != one["endpoints"][1], "its keys are new"
    for each in (one, other):
        assert each["other is untouched"]
        assert each["left"] == []


def test_failed_start_names_the_failed_node(seen: list[dict[str, Any]]) -> None:
    for each in seen:
        died, hung = each["dies"], each["hangs"]
        assert f"node 1 of 2 on {os.uname().nodename} did not start: its process ended with exit code 3" in died["said"]
        assert "RuntimeError: no memory is left" in died["said"]
        assert died["seconds"] < 30, "the first node does not wait for its deadline"
        assert "node 1 of 2" in hung["said"]
        assert "/health did not answer 200 within 4 s" in hung["said"]
        assert died["left"] == hung["left"] == []
