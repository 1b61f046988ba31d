"""The figures of benchmarks/weight_links.py are those of what transports and the exporter really ask for."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from mega_rl.converters.hf.config import parse_hf_config
from mega_rl.converters.plan.sharding import Sharding
from mega_rl.parallel.comm import SingleRank
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.rollout.sglang.http.keys import Endpoint, Keys
from mega_rl.rollout.sglang.weights.transport import Server
from mega_rl.rollout.sglang.weights.transports import process_group
from tests.unit_tests.converters.tiny_configs import TINY
from tests.unit_tests.rollout.sglang.test_server_groups import trainer

BENCHMARKS = Path(__file__).parents[4] / "benchmarks"
HOSTS = (1, 8, 64)
# family -> layout of one rank's groups; replicas fill the hosts
LAYOUTS = [
    ("qwen3", {"tp": 2}),
    ("qwen3", {"tp": 2, "pp": 2}),
    ("qwen3_moe", {"ep": 2}),
    ("qwen3_moe", {"tp": 2, "pp": 2, "ep": 2}),
    ("qwen3_moe", {"ep": 2, "etp": 2}),
]


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The benchmark, which is a program beside the package."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import weight_links

    yield weight_links
    sys.modules.pop("weight_links", None)


class Run(SingleRank):
    """The ranks of a run of one; no group was made for it."""

    group = None


class CountingReceiver:
    """`control.Control` of a server that is told of weights and takes none."""

    def __init__(self, index: int) -> None:
        self.endpoint = Endpoint(index, f"http://127.0.0.1:{31000 + index}", Keys("api", "admin"))
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self.calls.update([name])


@pytest.mark.parametrize("hosts", HOSTS)
def test_bytes_leave_the_trainer_once_for_all_servers(links: Any, monkeypatch: pytest.MonkeyPatch, hosts: int) -> None:
    """The transport itself, over groups that count: one broadcast of each bucket, a request of each to every server."""
    sent: list[int] = []
    sizes: list[int] = []

    class CountingGroup:
        def __init__(self, *, size: int, **_: Any) -> None:
            sizes.append(size)

        def join(self, *_: Any, **__: Any) -> Future[None]:
            return _done()

        def broadcast(self, data: torch.Tensor) -> Future[None]:
            sent.append(data.nbytes)
            return _done()

        def close(self) -> None:
            pass

    monkeypatch.setattr(process_group, "open_ranks", lambda *_, **__: Run())
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda _: None)
    monkeypatch.setattr(process_group, "ServerGroup", CountingGroup)
    weights, state = trainer()
    receivers: list[Any] = [CountingReceiver(index) for index in range(hosts)]
    servers = [Server(index, 8, (index,), receiver) for index, receiver in enumerate(receivers)]
    transport = process_group.DistributedTransport(weights, servers, bucket_bytes=4000, timeout_s=20.0)
    calls = []
    for version in (1, 2):
        transport.send(version=version)
        calls.append(sum(receiver.calls.total() for receiver in receivers))
    transport.close()
    sharding = Sharding(parse_hf_config({"model_type": "qwen3", "architectures": ["X"], **TINY["qwen3"]}))
    counted = links.separate(sharding, servers=hosts, bucket_bytes=4000, itemsize=4)
    assert counted.model_bytes == sum(tensor.nbytes for tensor in state.values())
    assert sizes == [1 + 8 * hosts]
    assert sum(sent) == 2 * counted.out[0] == 2 * counted.model_bytes
    assert calls == [counted.requests + counted.joining, 2 * counted.requests + counted.joining]
    assert sum(receiver.calls["update_from_distributed"] for receiver in receivers) == 2 * counted.requests


def _done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future


def test_experts_are_gathered_in_buffers_of_a_bucket(links: Any) -> None:
    """At EP 64 as at EP 1: the buffer had room for a bucket of every rank that gathers."""
    hf = parse_hf_config(links.MODELS["Qwen3-30B-A3B"] | {"num_hidden_layers": 2, "vocab_size": 4096})
    for ep in (1, 8, 64):
        sharding = Sharding(hf, ParallelLayout(world_size=64, ep=ep))
        assert links.gather_bytes(sharding, bucket_bytes=64 << 20, itemsize=2) <= 64 << 20
