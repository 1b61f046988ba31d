"""Trainer ranks send their weights by every transport; what lands is what `export_hf` gathers, bit for bit."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from mega_rl.config.schema import Config, MegatronConfig
from mega_rl.config.schema.engine import DdpConfig, TorchFsdpConfig
from tests.helpers.distributed import run_ranks
from tests.helpers.engines import exported, make_config, running_engine
from tests.helpers.host_device import HostDevice
from tests.helpers.models import write_tiny_checkpoint
from tests.helpers.selection import FULL

pytestmark = pytest.mark.timeout(900)  # the first test pays for the launches of all

SOURCES = {"qwen3": "qwen3", "moe": "qwen3_moe", "mla": "deepseek_v3"}
# case -> (ranks, source, parallel, dtype of the engine)
CASES: dict[str, tuple[int, str, MegatronConfig, str]] = {
    "tp2": (2, "qwen3", MegatronConfig(tp=2), "bf16"),
    "pp2": (2, "qwen3", MegatronConfig(pp=2), "fp32"),
    "fsdp2": (2, "qwen3", MegatronConfig(), "fp32"),
    "ep2": (2, "moe", MegatronConfig(ep=2), "fp32"),
    "tp2-ep2": (2, "moe", MegatronConfig(tp=2, ep=2, etp=1, sequence_parallel=True), "bf16"),
    "mla-tp2": (2, "mla", MegatronConfig(tp=2, sequence_parallel=True), "bf16"),
    "tp2-pp2": (4, "qwen3", MegatronConfig(tp=2, pp=2), "bf16"),
    "tp2-dp2": (4, "qwen3", MegatronConfig(tp=2), "fp32"),
}
# Also over two hosts of half the ranks each, to servers that share the ranks' devices.
APART = tuple(CASES) if FULL else ("pp2", "fsdp2", "tp2-ep2", "tp2-pp2")
BUCKET_BYTES = 9_000  # a few units
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TIMEOUT_S = 60.0


def config_of(case: str, root: Path) -> Config:
    _, source, parallel, dtype = CASES[case]
    ddp = TorchFsdpConfig() if case == "fsdp2" else DdpConfig()
    return make_config(root / source, dtype=dtype, megatron=parallel, ddp=ddp)


@contextmanager
def weights_of(case: str, root: Path, *, dtype: torch.dtype | None = None) -> Iterator[Any]:
    """An engine on this rank, as transports see it."""
    with running_engine(config_of(case, root), trainable=case == "fsdp2") as engine:
        from mega_rl.rollout.sglang.weights.transport import TrainerWeights

        yield TrainerWeights(engine, dtype or DTYPES[CASES[case][3]])


def servers_for(rank: int, hosts: tuple[int, ...], leaders: dict[int, int], **kwargs: Any) -> list[Any]:
    """Server i of every leader's host; the receiver on its leader."""
    from mega_rl.rollout.sglang.weights.transport import Server
    from tests.helpers.weight_receiver import FakeReceiver

    sizes = [min(1 + index, hosts.count(hosts[leader])) for index, leader in leaders.items()]
    return [
        Server(index, tp, (hosts[leader],), FakeReceiver(index, tp=tp, **kwargs) if rank == leader else None)
        for tp, (index, leader) in zip(sizes, leaders.items(), strict=True)
    ]


def differences(expected: dict[str, torch.Tensor], actual: dict[str, torch.Tensor]) -> list[str]:
    return [
        name
        for name in {**expected, **actual}
        if name not in expected
        or name not in actual
        or expected[name].dtype != actual[name].dtype
        or not torch.equal(expected[name], actual[name])
    ]


def send_all(rank: int, root: str, cases: list[str]) -> dict[str, Any]:
    """What every transport did in every case, twice each; the second time with other weights."""
    answers: dict[str, Any] = {}
    for case in cases:
        with weights_of(case, Path(root)) as weights:
            for name, make in makers(weights, apart=case in APART).items():
                answers[f"{case} {name}"] = send_twice(rank, weights, make, hosts_for(name))
            if case == "tp2-pp2":
                answers["spanning"] = send_to_spanning(rank, weights)
    return answers


def send_to_spanning(rank: int, weights: Any) -> dict[str, Any]:
    """Two servers with a rank on each of two hosts: what the bytes of each of their ranks are, and who made them."""
    import torch.distributed as dist

    from mega_rl.rollout.sglang.weights.cuda_ipc import CudaIpcTransport
    from mega_rl.rollout.sglang.weights.transport import Server
    from tests.helpers.weight_receiver import SpanningReceiver

    receivers = [SpanningReceiver(index, tp=2) for index in range(2)]
    servers = [Server(index, 2, (0, 1), receivers[index] if rank == 0 else None) for index in range(2)]
    device = HostDevice()
    transport = CudaIpcTransport(
        weights, servers, hosts=(0, 0, 1, 1), bucket_bytes=BUCKET_BYTES, timeout_s=TIMEOUT_S, device=device
    )
    expected = {name: tensor.clone() for name, tensor in exported(weights.engine).items()}
    failed = transport.send(version=3)
    transport.close()
    pids: list[Any] = [None] * 4
    dist.all_gather_object(pids, os.getpid())
    return {
        "failed": failed,
        "requests": len(receivers[0].calls) == (len(transport.buckets) if rank == 0 else 0),
        "different": [name for one in receivers for name in differences(expected, one.weights)] if rank == 0 else [],
        "held": device.held,
        "makers": [[[pids.index(pid) for pid in call] for call in one.makers] for one in receivers],
    }


Make = Callable[[list[Any], tuple[int, ...]], Any]


def makers(weights: Any, *, apart: bool = True) -> dict[str, Make]:
    from mega_rl.rollout.sglang.weights.cuda_ipc import CudaIpcTransport
    from mega_rl.rollout.sglang.weights.process_group import DistributedTransport

    given: dict[str, Any] = {"bucket_bytes": BUCKET_BYTES, "timeout_s": TIMEOUT_S}
    actual: dict[str, Make] = {"distributed": lambda servers, hosts: DistributedTransport(weights, servers, **given)}
    if apart:
        actual["cuda_ipc"] = lambda servers, hosts: CudaIpcTransport(
            weights, servers, hosts=hosts, device=HostDevice(), **given
        )
    return actual


def hosts_for(name: str) -> tuple[int, ...]:
    """Host of each rank: two of half the ranks where devices are shared, else one."""
    half = int(os.environ["WORLD_SIZE"]) // 2
    return (0,) * half + (int(name == "cuda_ipc"),) * half


def send_twice(rank: int, weights: Any, make: Make, hosts: tuple[int, ...]) -> dict[str, Any]:
    leaders = {0: 0, 1: hosts.index(hosts[-1])}
    servers = servers_for(rank, hosts, leaders)
    transport = make(servers, hosts)
    answer: dict[str, Any] = {"different": [], "sends": []}
    for version in (3, 4):
        expected = {name: tensor.clone() for name, tensor in exported(weights.engine).items()}
        failed = transport.send(version=version)
        for server in servers:
            if server.receiver is not None:
                answer["different"] += differences(expected, server.receiver.weights)
                server.receiver.weights = {}
        calls = [len(server.receiver.calls) for server in servers if server.receiver is not None]
        answer["sends"].append((failed, sum(calls)))
        if not weights.engine.is_sharded:
            with torch.no_grad():
                for chunk in weights.engine.whole_chunks():
                    for parameter in chunk.parameters():
                        parameter.mul_(-1.5)
    answer["buffers"] = getattr(getattr(transport, "_device", None), "most", 0)
    answer["held"] = getattr(getattr(transport, "_device", None), "held", 0)
    answer["peak"] = getattr(getattr(transport, "_device", None), "peak", 0)
    answer["counted"] = counted_bytes(weights)
    answer["over groups"] = [
        list(server.receiver.messages.values()) for server in servers if server.receiver is not None
    ]
    answer["expected_bytes"] = sum(tensor.nbytes for tensor in expected.values())
    answer["names"] = len(expected)
    answer["tensors"] = sum(len(bucket.slots) for bucket in transport.buckets)
    answer["sizes"] = [bucket.nbytes for bucket in transport.buckets]
    transport.close()
    answer["versions"] = [server.receiver.versions for server in servers if server.receiver is not None]
    answer["received"] = [server.receiver.received for server in servers if server.receiver is not None]
    answer["calls"] = [len(server.receiver.calls) for server in servers if server.receiver is not None]
    return answer


def counted_bytes(weights: Any) -> int:
    """Return what `sending_bytes` counts for buckets of the usual size, without a tensor and its gathered parts."""
    from mega_rl.rollout.sglang.weights.reshard import sending_bytes

    hf, itemsize = weights.engine.sharding.hf, weights.dtype.itemsize
    largest = max(hf.vocab_size, 2 * hf.ffn_hidden_size) * hf.hidden_size * itemsize
    return sending_bytes(hf, bucket_bytes=BUCKET_BYTES, itemsize=itemsize) - 2 * max(BUCKET_BYTES, largest)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    for name, family in SOURCES.items():
        write_tiny_checkpoint(folder / name, family=family, vocab_size=51, dtype=torch.bfloat16, tied=family == "qwen3")
    return folder


@pytest.fixture(scope="module")
def answers(root: Path) -> dict[str, list[dict[str, Any]]]:
    """By case and transport, what every rank found."""
    actual: dict[str, list[dict[str, Any]]] = {}
    for world_size in (2, 4):
        cases = [case for case, (size, *_) in CASES.items() if size == world_size]
        ranks = run_ranks(world_size, send_all, str(root), cases, timeout_s=400)
        for key in ranks[0]:
            actual[key] = [answer[key] for answer in ranks]
    return actual


SENDINGS = [(case, "distributed") for case in CASES] + [(case, "cuda_ipc") for case in APART]


@pytest.mark.parametrize(("case", "transport"), SENDINGS)
def test_what_lands_is_what_export_gathers(answers: dict[str, Any], case: str, transport: str) -> None:
    """Names, dtypes and bits of every update; each byte once; as many requests as buckets; the version at the end."""
    ranks = answers[f"{case} {transport}"]
    buckets = len(ranks[0]["sizes"])
    for answer in ranks:
        assert answer["different"] == []
        assert answer["held"] == 0, "memory that nobody has opened stays for ever"
        nbytes, names = answer["expected_bytes"], answer["names"]
        assert (sum(answer["sizes"]), answer["tensors"]) == (nbytes, names)
        assert [failed for failed, _ in answer["sends"]] == [{}, {}]
        assert answer["received"] == [2 * nbytes] * len(answer["received"])
        for versions in answer["versions"]:
            assert versions == [*[None] * (buckets - 1), 3, *[None] * (buckets - 1), 4]
    connecting = 2 * CASES[case][2].pp if transport == "distributed" else 0  # a group of each stage
    calls = [sum(answer["sends"][send][1] for answer in ranks) for send in range(2)]
    assert calls == [2 * buckets + connecting, 4 * buckets + connecting]
    assert sum(sum(answer["calls"]) for answer in ranks) == calls[1] + connecting  # and as many to leave the groups


@pytest.mark.parametrize("case", CASES)
def test_each_stage_sends_over_its_group(answers: dict[str, Any], case: str) -> None:
    """To every server, whatever its size."""
    ranks = answers[f"{case} distributed"]
    stages = CASES[case][2].pp
    (first, *others) = ranks[0]["over groups"]
    assert len(first) == stages
    assert sum(first) == 2 * ranks[0]["expected_bytes"]
    assert all(sent > 0 for sent in first)
    assert all(sent == first for sent in others)


def test_ranks_of_a_spanning_server_open_local_memory(answers: dict[str, Any]) -> None:
    """The first rank of the server's first host sends both hosts' handles: of ranks 0 and 2, and of 1 and 3."""
    for answer in answers["spanning"]:
        assert answer["failed"] == {}
        assert answer["held"] == 0
        assert answer["requests"]
        assert answer["different"] == []
    first, second = answers["spanning"][0]["makers"]
    assert first
    assert all(makers == [0, 2] for makers in first)
    assert all(makers == [1, 3] for makers in second)


@pytest.mark.parametrize("case", APART)
def test_shared_devices_hold_three_buckets(answers: dict[str, Any], case: str) -> None:
    """One that servers load, the one before it, one that is being filled."""
    for answer in answers[f"{case} cuda_ipc"]:
        assert answer["buffers"] == min(3, len(answer["sizes"]))
        assert answer["counted"] / 2 < answer["peak"] <= answer["counted"], "what a colocated server leaves to a send"


def fail_some(rank: int, root: str) -> dict[str, Any]:
    """Two servers, one of which breaks at some request: what all ranks are told, and what the other one got."""
    from tests.helpers.weight_receiver import FakeReceiver

    answers: dict[str, Any] = {}
    with weights_of("tp2", Path(root)) as weights:
        for name, make in makers(weights).items():
            for at in (1, 2):
                hosts = hosts_for(name)
                servers = servers_for(rank, hosts, {0: 0, 1: hosts.index(hosts[-1])})
                broken: FakeReceiver | None = servers[1].receiver
                if broken is not None:

                    def fail(number: int, at: int = at, broken: Any = broken) -> None:
                        if number == at:
                            raise broken.error("out of order")

                    broken._fail = fail
                transport = make(servers, hosts)
                answer: dict[str, Any] = {"failed": transport.send(version=7)}
                answer["calls"] = 0  # of the broken server; leaving a group frees those that wait for it
                if broken is not None:
                    answer["calls"] = len([call for call in broken.calls if call != "destroy"])
                # The server is well again, and gets everything.
                answer["again"] = len(transport.send(version=8, servers=[1]))
                expected = exported_now(weights)
                answer["different"] = [
                    name
                    for server in servers
                    if server.receiver is not None
                    for name in differences(expected, server.receiver.weights)
                ]
                if rank == 0:
                    answer["first"] = servers[0].receiver.versions[-1]
                answer["held"] = getattr(getattr(transport, "_device", None), "held", 0)
                transport.close()
                answers[f"{name} {at}"] = answer
    return answers


def exported_now(weights: Any) -> dict[str, torch.Tensor]:
    return exported(weights.engine)


def test_a_server_that_fails_hinders_no_other(root: Path) -> None:
    """All ranks learn who failed and why; the others have all weights; the failed one can be served again."""
    ranks = run_ranks(2, fail_some, str(root), timeout_s=300)
    for key, answer in ranks[0].items():
        assert list(answer["failed"]) == [1], key
        assert "out of order" in answer["failed"][1]
        assert ranks[1][key]["failed"] == answer["failed"]
        assert answer["different"] == ranks[1][key]["different"] == [], key
        assert answer["again"] == ranks[1][key]["again"] == 0
        assert answer["first"] == 7
        at = int(key.split()[-1])
        assert answer["calls"] + ranks[1][key]["calls"] == at, f"{key}: requests went on after the failure"
        # The bucket that the broken server never opened; nothing where the well one is, nor in its refit.
        assert (answer["held"], ranks[1][key]["held"]) == (0, int(key.startswith("cuda_ipc"))), key
