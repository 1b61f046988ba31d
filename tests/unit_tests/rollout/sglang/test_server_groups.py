"""Servers in one process group with the trainer: one that fails, wherever it sits in a broadcast, takes no other along.

Over gloo a broadcast is a binary tree: of four ranks, 0 sends to 1 and 2, and 2 to 3. So the second of three servers of
one rank each stands between the trainer and the third.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mega_rl.converters.hf.config import parse_hf_config
from mega_rl.converters.plan.export import export_plan
from mega_rl.converters.plan.sharding import Sharding
from mega_rl.parallel.layout import ParallelLayout, RankCoordinates
from mega_rl.rollout.sglang.weights.reshard import plan_buckets
from mega_rl.rollout.sglang.weights.transport import Server
from tests.helpers.distributed import run_ranks
from tests.helpers.weight_receiver import FakeReceiver
from tests.unit_tests.converters.fakes import hf_state
from tests.unit_tests.converters.tiny_configs import TINY

BUCKET_BYTES = 4000
TIMEOUT_S = 20.0
MIDDLE, LEAF = 1, 2

Fault = Callable[[FakeReceiver, int], None]


def refuses(at: int) -> Fault:
    """Answer the request number `at` with an error, at once and without the others."""

    def fault(server: FakeReceiver, number: int) -> None:
        if number == at:
            raise server.error("out of order")

    return fault


def dies(at: int) -> Fault:
    """End all connections in the request number `at`, and give no answer to any from then on."""

    def fault(server: FakeReceiver, number: int) -> None:
        if number >= at:
            server._groups.clear()
            raise server.error("connection refused", status=None)

    return fault


def blames_others(server: FakeReceiver, number: int) -> None:
    """Answer every update as a server whose peer is gone."""
    if server.calls[-1] == "distributed":
        raise server.error("Failed to update parameter online: [gloo] Connection closed by peer [127.0.0.1]:1")


# name -> (faults of servers, those that fail)
CASES: dict[str, tuple[dict[int, Fault], list[int]]] = {
    "none": ({}, []),
    "refuses the group": ({MIDDLE: refuses(1)}, [MIDDLE]),
    "refuses the first bucket": ({MIDDLE: refuses(2)}, [MIDDLE]),
    "refuses a later bucket": ({MIDDLE: refuses(4)}, [MIDDLE]),
    "dies before a bucket": ({MIDDLE: dies(3)}, [MIDDLE]),
    "a leaf dies": ({LEAF: dies(3)}, [LEAF]),
    "two die one after the other": ({MIDDLE: dies(3), 0: dies(6)}, [0, MIDDLE]),
    "blames others": ({MIDDLE: blames_others}, [MIDDLE]),
    "all refuse": ({i: refuses(3) for i in range(3)}, [0, 1, 2]),
}


def trainer() -> tuple[Any, dict[str, torch.Tensor]]:
    """(weights of one rank as transports see them, the same by name)."""
    sharding = Sharding(parse_hf_config({"model_type": "qwen3", "architectures": ["X"], **TINY["qwen3"]}))
    state = hf_state(sharding.hf)

    def export(**_: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, state[name]) for unit in export_plan(sharding) for name, _, _ in unit.tensors)

    place = SimpleNamespace(gathers_first_copy=True, coordinates=RankCoordinates())
    weights = SimpleNamespace(
        dtype=torch.float32,
        engine=SimpleNamespace(
            sharding=SimpleNamespace(layout=ParallelLayout()), place=place, device=torch.device("cpu")
        ),
        buckets=lambda nbytes, by_stage: plan_buckets(sharding, bucket_bytes=nbytes, itemsize=4, by_stage=by_stage),
        export=export,
    )
    return weights, state


def send_all_cases(rank: int) -> dict[str, Any]:
    import torch.distributed as dist

    from mega_rl.rollout.sglang.weights.process_group import DistributedTransport

    dist.init_process_group("gloo")
    weights, state = trainer()
    answers = {}
    for name, (faults, _) in CASES.items():
        receivers = [FakeReceiver(index) for index in range(3)]
        for index, fault in faults.items():
            receivers[index]._fail = lambda number, own=receivers[index], fault=fault: fault(own, number)
        servers = [Server(index, 1, (1,), receiver) for index, receiver in enumerate(receivers)]
        transport = DistributedTransport(weights, servers, bucket_bytes=BUCKET_BYTES, timeout_s=TIMEOUT_S)
        start = time.monotonic()
        failed = transport.send(version=7)
        seconds = time.monotonic() - start
        intact = [_holds(receiver, state) for receiver in receivers]
        versions = [receiver.versions[-1:] for receiver in receivers]
        for receiver in receivers:  # all are well again
            receiver._fail = lambda number: None
            receiver.weights = {}
        again = transport.send(version=8, servers=[0, MIDDLE])
        intact_again = [_holds(receiver, state) for receiver in receivers]
        transport.close()
        answers[name] = {
            "failed": sorted(failed),
            "buckets": len(transport.buckets),
            "seconds": seconds,
            "intact": intact,
            "versions": versions,
            "again": (list(again), intact_again),
            "left": [len(receiver._groups) for receiver in receivers],
        }
    return answers


def _holds(receiver: FakeReceiver, state: dict[str, torch.Tensor]) -> bool:
    return receiver.weights.keys() == state.keys() and all(
        torch.equal(receiver.weights[name], tensor) for name, tensor in state.items()
    )


@pytest.fixture(scope="module")
def answers() -> Any:
    (answers,) = run_ranks(1, send_all_cases, timeout_s=120.0, device="cpu")
    return answers


@pytest.mark.parametrize("case", CASES)
def test_a_server_that_fails_takes_no_other_along(answers: Any, case: str) -> None:
    """All others hold all weights, bit for bit, long before any deadline; the next update reaches all servers."""
    answer, failing = answers[case], CASES[case][1]
    assert answer["buckets"] > 5
    assert answer["failed"] == failing
    assert answer["seconds"] < TIMEOUT_S / 2
    for index in {0, 1, 2} - set(failing):
        assert answer["intact"][index], f"server {index} lacks weights"
        assert answer["versions"][index] == [7]
    assert answer["again"] == ([], [True, True, False])
    assert answer["left"] == [0, 0, 0], "servers are still in groups"
