"""The figures of benchmarks/weight_links.py are those of what transports and the exporter really ask for."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mega_rl.converters.hf.config import parse_hf_config
from mega_rl.converters.live import export
from mega_rl.converters.live.place import ModelPlace
from mega_rl.converters.plan.ranks import build_plan
from mega_rl.converters.plan.sharding import Sharding
from mega_rl.parallel.comm import SingleRank
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.rollout.sglang.http.keys import Endpoint, Keys
from mega_rl.rollout.sglang.weights.transport import Server
from mega_rl.rollout.sglang.weights.transports import process_group
from tests.unit_tests.converters.fakes import hf_state
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


class CountingReceiver:
    """`control.Control` of a server that is told of weights and takes none."""

    def __init__(self, index: int) -> None:
        self.endpoint = Endpoint(index, f"http://127.0.0.1:{31000 + index}", Keys("api", "admin"))
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self.calls.update([name])


@pytest.mark.parametrize("hosts", HOSTS)
def test_bytes_leave_the_trainer_once_whatever_the_number_of_servers(
    links: Any, monkeypatch: pytest.MonkeyPatch, hosts: int
) -> None:
    """The transport itself, over groups that count: one broadcast of each bucket, a request of each to every server."""
    sent: list[int] = []
    sizes: list[int] = []

    class CountingGroup:
        def __init__(self, name: str, *, size: int, **_: Any) -> None:
            sizes.append(size)

        def join(self, *_: Any, **__: Any) -> Future[None]:
            return _done()

        def broadcast(self, data: torch.Tensor) -> Future[None]:
            sent.append(data.nbytes)
            return _done()

        def close(self) -> None:
            pass

    monkeypatch.setattr(process_group, "open_ranks", lambda *_, **__: SingleRank())
    monkeypatch.setattr(process_group, "close_ranks", lambda *_: None)
    monkeypatch.setattr(process_group, "ServerGroup", CountingGroup)
    weights, state = trainer()
    receivers: list[Any] = [CountingReceiver(index) for index in range(hosts)]
    servers = [Server(index, 8, f"host {index}", receiver) for index, receiver in enumerate(receivers)]
    transport = process_group.DistributedTransport(weights, servers, bucket_bytes=4000, timeout_s=20.0)
    first, second = (transport.send(version=version) for version in (1, 2))
    transport.close()
    sharding = Sharding(parse_hf_config({"model_type": "qwen3", "architectures": ["X"], **TINY["qwen3"]}))
    counted = links.separate(sharding, servers=hosts, bucket_bytes=4000, itemsize=4)
    assert counted.model_bytes == sum(tensor.nbytes for tensor in state.values())
    assert sizes == [1 + 8 * hosts]
    assert sum(sent) == 2 * counted.out[0] == 2 * counted.model_bytes
    assert (first.requests, second.requests) == (counted.requests + counted.joining, counted.requests)
    assert sum(receiver.calls["update_from_distributed"] for receiver in receivers) == 2 * counted.requests


def _done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize(("family", "sizes"), LAYOUTS)
def test_what_ranks_receive_is_what_the_exporter_broadcasts(
    links: Any, monkeypatch: pytest.MonkeyPatch, family: str, sizes: dict[str, int], hosts: int
) -> None:
    """The exporter itself, with groups that count, on the first and last ranks and on some between."""
    layout = ParallelLayout(world_size=links.GPUS * hosts, **sizes)
    sharding = Sharding(parse_hf_config({"model_type": family, "architectures": ["X"], **TINY[family]}), layout)
    expected = links.received(sharding, itemsize=4)
    state = hf_state(sharding.hf)
    got: Counter[int] = Counter()

    def broadcast(tensor: torch.Tensor, *, group: Any, group_src: int) -> None:
        if group.rank() != group_src:
            got[group.owner] += tensor.nbytes

    monkeypatch.setattr(export, "weights_of", lambda chunk: chunk)
    monkeypatch.setattr(export.dist, "get_backend", lambda group: "gloo")
    monkeypatch.setattr(export.dist, "broadcast", broadcast)
    ranks = sorted({0, 1, layout.stage_size - 1, layout.world_size // 2, layout.world_size - 1})
    for rank in ranks:
        at = layout.coordinates(rank)
        chunks: list[Any] = [{param.name: torch.zeros(param.shape) for param in build_plan(sharding, at)}]

        def group(size: int, place: int, owner: int = rank) -> Any:
            return SimpleNamespace(size=lambda: size, rank=lambda: place, owner=owner)

        place = ModelPlace(
            sharding,
            at,
            tp_group=group(layout.tp, at.tp_rank),
            pp_group=group(layout.pp, at.pp_rank),
            expert_group=group(layout.ep * layout.etp, at.ep_rank * layout.etp + at.etp_rank),
            bucket_bytes=5000,
        )
        assert {name for name, _ in export.export_hf(chunks, place)} == set(state)
    assert {rank: got[rank] for rank in ranks} == {rank: expected[rank].total() for rank in ranks}


def test_experts_are_gathered_in_buffers_of_a_bucket(links: Any) -> None:
    """At EP 64 as at EP 1: the buffer had room for a bucket of every rank that gathers."""
    hf = parse_hf_config(links.MODELS["Qwen3-30B-A3B"] | {"num_hidden_layers": 2, "vocab_size": 4096})
    for ep in (1, 8, 64):
        sharding = Sharding(hf, ParallelLayout(world_size=64, ep=ep))
        assert links.gather_bytes(sharding, bucket_bytes=64 << 20, itemsize=2) <= 64 << 20
