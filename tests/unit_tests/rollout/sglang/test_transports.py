"""The parts of transports that need no second rank: payloads, memory, requests, the choice."""

from __future__ import annotations

import base64
import json
import os
import pickle
import pickletools
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mega_rl.config.keys import FIELDS
from mega_rl.errors import UserError
from mega_rl.parallel.comm import SingleRank
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.rollout.sglang.server.addresses import address_for, address_towards
from mega_rl.rollout.sglang.weights.buckets import MappedFile, payload, slot_tensor
from mega_rl.rollout.sglang.weights.reshard import Bucket, Slot
from mega_rl.rollout.sglang.weights.transport import Server, ServerRequests
from mega_rl.rollout.sglang.weights.transports import choose
from mega_rl.rollout.sglang.weights.transports.choose import (
    Placement,
    choose_transport,
    why_not,
)
from mega_rl.rollout.sglang.weights.transports.cuda_ipc import (
    CudaDevice,
    CudaIpcTransport,
    as_json,
    from_json,
    ranks_of_servers,
    with_uuid,
)
from mega_rl.rollout.sglang.weights.transports.process_group import DistributedTransport
from mega_rl.rollout.sglang.weights.transports.shared_memory import SharedMemoryTransport, _anonymous_file, _places
from tests.helpers.weight_receiver import FakeReceiver

# SafeUnpickler.ALLOWED_MODULE_PREFIXES and DENY_CLASSES of SGLang 0.5.20 (srt/utils/common.py), as far as they matter.
ADMITTED = ("builtins.", "functools.", "types.", "torch.")
DENIED = {("builtins", "eval"), ("builtins", "exec"), ("builtins", "compile"), ("types", "CodeType")}

BUCKET = Bucket((), (Slot("gate", (3,), True, 0, 12), Slot("w", (2, 3), False, 12, 24)))


def globals_in(text: str) -> set[tuple[str, str]]:
    """(module, name) of everything that a pickle looks up, as STACK_GLOBAL finds them: the last two strings."""
    actual, strings, memo = set(), [], []
    for opcode, argument, _ in pickletools.genops(base64.b64decode(text)):
        if isinstance(argument, str):
            strings.append(argument)
        elif opcode.name == "MEMOIZE":
            memo.append(strings[-1] if strings else "")
        elif opcode.name in ("BINGET", "LONG_BINGET"):
            strings.append(memo[argument])
        elif opcode.name == "STACK_GLOBAL":
            actual.add((strings[-2], strings[-1]))
    return actual


@pytest.fixture
def shared() -> Iterator[tuple[str, torch.Tensor]]:
    """(path, bytes) of memory as the first rank of a host makes it."""
    descriptor = _anonymous_file(4096)
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    yield path, torch.from_file(path, shared=True, size=4096, dtype=torch.uint8)
    os.close(descriptor)


def test_payload_says_where_tensors_are(shared: tuple[str, torch.Tensor]) -> None:
    """What unpickles are the bytes of now, at their offset, as SGLang cuts them."""
    path, memory = shared
    flat = memory[64:88]
    gate, w = torch.tensor([1.0, -2.0, 3.0]), torch.arange(6.0).view(2, 3).bfloat16()
    text = payload(MappedFile(path, 88), BUCKET, torch.bfloat16, offset=64)
    slot_tensor(flat, BUCKET.slots[0], torch.bfloat16).copy_(gate)
    slot_tensor(flat, BUCKET.slots[1], torch.bfloat16).copy_(w)
    content = pickle.loads(base64.b64decode(text))
    actual = {
        meta.name: content["flattened_tensor"][meta.start_idx : meta.end_idx].view(meta.dtype).reshape(meta.shape)
        for meta in content["metadata"]
    }
    assert torch.equal(actual["gate"], gate)
    assert torch.equal(actual["w"], w)
    assert [meta.numel for meta in content["metadata"]] == [12, 12]


def test_a_reader_cannot_change_the_memory(shared: tuple[str, torch.Tensor]) -> None:
    path, memory = shared
    content = pickle.loads(base64.b64decode(payload(MappedFile(path, 24), BUCKET, torch.bfloat16)))
    content["flattened_tensor"].fill_(9)
    assert not memory.any()


def test_payload_has_no_name_that_sglang_refuses(shared: tuple[str, torch.Tensor]) -> None:
    """And none of SGLang's, which is not installed here."""
    names = globals_in(payload(MappedFile(shared[0], 24), BUCKET, torch.bfloat16))
    assert ("functools", "partial") in names
    assert ("types", "SimpleNamespace") in names
    for module, name in names:
        assert (module + ".").startswith(ADMITTED), f"{module}.{name}"
        assert (module, name) not in DENIED


def test_memory_ends_with_the_process_that_made_it() -> None:
    """Killed at any moment it leaves nothing: the file has no name in any folder, and the descriptor's path is gone."""
    program = (
        "from mega_rl.rollout.sglang.weights.transports.shared_memory import _anonymous_file; import os, time\n"
        "print(f'/proc/{os.getpid()}/fd/{_anonymous_file(1 << 20)}', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        path = process.stdout.readline().strip()
        assert Path(path).stat().st_size == 1 << 20
        assert os.readlink(path) == "/memfd:mega_rl-weights (deleted)"
        process.send_signal(signal.SIGKILL)
    assert not os.path.exists(path)


@pytest.mark.parametrize("sizes", [[10], [100, 100, 100], [700, 64, 64, 65], [1, 500, 500, 1], [5, 3, 900]])
def test_neighbouring_buckets_do_not_meet(sizes: list[int]) -> None:
    buckets = [Bucket((), (Slot("x", (size,), False, 0, size),)) for size in sizes]
    offsets, total = _places(buckets)
    for number, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        assert 0 <= offset <= offset + size <= total
        assert offset % 4 == 0
        if number:
            before = range(offsets[number - 1], offsets[number - 1] + sizes[number - 1])
            assert offset >= before.stop or offset + size <= before.start
    pairs = [a + b for a, b in zip(sizes, [*sizes[1:], 0], strict=True)]
    assert total <= max(pairs) + 128


# --- requests


def servers(*receivers: FakeReceiver) -> list[Server]:
    return [Server(i, 1, ("here",), receiver) for i, receiver in enumerate(receivers)]


def test_own_bug_is_raised_after_ranks_agree() -> None:
    """The other ranks are inside collectives until then; what is no server's fault is not passed off as one."""

    def work(server: Server, receiver: Any) -> None:
        raise KeyError("x")

    with ServerRequests(servers(FakeReceiver())) as requests:
        requests.start(work)
        requests.wait()
        with pytest.raises(KeyError):
            requests.agree(SingleRank())


# --- the choice


def weights(device: str = "cpu", **layout: int) -> Any:
    """What the choice asks of an engine's weights."""
    sharding = SimpleNamespace(layout=ParallelLayout(**(layout or {"world_size": 2, "tp": 2})))
    return SimpleNamespace(
        device=torch.device(device),
        dtype=torch.bfloat16,
        engine=SimpleNamespace(sharding=sharding),
        buckets=lambda nbytes, by_stage=False: (),
    )


def chosen_name(setting: str, model: Any, where: Placement, *hosts: str | None, tp: int = 1) -> str:
    actual = [Server(i, tp, (host,) if host else ()) for i, host in enumerate(hosts)]
    return choose_transport(setting, model, actual, where, bucket_bytes=1, timeout_s=1.0).name


TOGETHER, APART = Placement(("a", "a"), colocated=True), Placement(("a", "a"), colocated=False)
TWO_HOSTS = Placement(("a", "b"), colocated=True)  # neither has a whole copy of a model at tp2


@pytest.mark.parametrize(
    ("setting", "device", "where", "hosts", "name"),
    [
        ("auto", "cpu", TOGETHER, ["a"], "shared_memory"),
        ("auto", "cpu", APART, ["a", "a"], "shared_memory"),
        ("auto", "cpu", APART, ["b"], "distributed"),
        ("auto", "cpu", APART, [None], "distributed"),
        ("auto", "cpu", APART, ["a", None], "distributed"),
        ("auto", "cuda", TOGETHER, ["a"], "cuda_ipc"),
        ("auto", "cuda", APART, ["a"], "distributed"),
        ("shared_memory", "cpu", APART, ["a"], "shared_memory"),
        ("shared_memory", "cuda", TOGETHER, ["a"], "cuda_ipc"),
        ("shared_memory", "cuda", APART, ["a"], "shared_memory"),
        ("auto", "cpu", TWO_HOSTS, ["a", "b"], "shared_memory"),
        ("auto", "cuda", TWO_HOSTS, ["a", "b"], "cuda_ipc"),
        ("auto", "cuda", TWO_HOSTS, ["b"], "cuda_ipc"),
        ("auto", "cuda", Placement(("a", "b"), colocated=False), ["a", "b"], "distributed"),
        ("auto", "cuda", TWO_HOSTS, ["a", "b", "b"], "shared_memory"),  # two servers on one GPU
        ("distributed", "cpu", TOGETHER, ["a"], "distributed"),
    ],
)
def test_the_choice(setting: str, device: str, where: Placement, hosts: list[str | None], name: str) -> None:
    assert chosen_name(setting, weights(device), where, *hosts) == name


@pytest.mark.parametrize(
    ("setting", "model", "where", "hosts", "tp", "reason"),
    [
        ("shared_memory", weights(), TOGETHER, ["b"], 1, "server 0 runs on a host without ranks of the trainer"),
        ("shared_memory", weights(), TOGETHER, [None], 1, "whether server 0 runs on the trainer's host is not known"),
        ("distributed", weights("cuda"), TOGETHER, ["a"], 1, "several processes on one GPU"),
        ("auto", weights("cuda"), TOGETHER, ["b"], 1, "cuda_ipc: server 0 runs on a host without ranks of the trainer"),
    ],
)
def test_transport_that_cannot_reach_servers_is_refused(
    setting: str, model: Any, where: Placement, hosts: list[str | None], tp: int, reason: str
) -> None:
    with pytest.raises(UserError, match=f"rollout.sglang.sync.transport={setting} is not possible") as refused:
        chosen_name(setting, model, where, *hosts, tp=tp)
    assert reason in str(refused.value)


def test_cuda_ipc_needs_a_gpu_per_server_rank() -> None:
    reason = why_not("cuda_ipc", weights("cuda"), [Server(0, 2, ("a",)), Server(1, 2, ("a",))], TOGETHER)
    assert reason == "servers of one host have 4 tensor-parallel ranks together, the trainer has 2 GPUs there"
    reason = why_not("cuda_ipc", weights("cuda"), [Server(0, 1, ("a",)), Server(1, 2, ("b",))], TWO_HOSTS)
    assert reason == "servers of one host have 2 tensor-parallel ranks together, the trainer has 1 GPUs there"


def test_servers_take_gpus_of_ranks_on_their_host() -> None:
    servers = [Server(0, 2, ("a",)), Server(1, 2, ("b",)), Server(2, 1, ("a",)), Server(3, 1, ("a",))]
    assert ranks_of_servers(servers, ["a", "a", "b", "a", "b"]) == {0: [0, 1], 1: [2, 4], 2: [3], 3: []}


def test_spanning_server_has_equal_shares_of_its_hosts() -> None:
    """In the order of its nodes; the next server has the GPUs after them, on each."""
    hosts = ["a", "a", "b", "b", "c", "c"]
    servers = [Server(0, 2, ("b", "a")), Server(1, 2, ("b", "a")), Server(2, 2, ("c",))]
    assert ranks_of_servers(servers, hosts) == {0: [2, 0], 1: [3, 1], 2: [4, 5]}
    where = Placement(tuple(hosts), colocated=True)
    assert why_not("cuda_ipc", weights("cuda"), servers, where) is None
    reason = why_not("cuda_ipc", weights("cuda"), [Server(0, 6, ("b", "a"))], where)
    assert reason == "servers of one host have 3 tensor-parallel ranks together, the trainer has 2 GPUs there"
    reason = why_not("cuda_ipc", weights("cuda"), [Server(0, 2, ("b", "z"))], where)
    assert reason == "server 0 runs on a host without ranks of the trainer"
    reason = why_not("shared_memory", weights(), servers, where)
    assert reason == "server 0 has ranks on several hosts, which share no memory with one sender"
    loopback = [Server(0, 2, ("b", "a"), FakeReceiver(0))]
    with pytest.raises(UserError, match="listens on loopback, and has to be reached from other hosts"):
        choose_transport(
            "auto", weights(), loopback, Placement(("b", "b"), colocated=False), bucket_bytes=1, timeout_s=1.0
        )


def test_loopback_is_no_meeting_point_of_several_hosts() -> None:
    """The sources of all stages and all servers meet in one group."""
    here = [Server(0, 1, ("a",), FakeReceiver(0))]
    assert why_not("distributed", weights(), here, APART) is None
    assert why_not("distributed", weights(), here, Placement(("a", "b"), colocated=False)) is None  # one stage
    for servers, model in (
        ([*here, Server(1, 1, ("b",), FakeReceiver(1))], weights()),
        (here, weights(world_size=2, pp=2)),
    ):
        reason = why_not("distributed", model, servers, Placement(("a", "b"), colocated=False))
        assert reason is not None
        assert reason.startswith("server 0 at http://127.0.0.1:31000 listens on loopback")


def test_who_talks_to_a_server() -> None:
    """Shared memory and devices: the first rank of its host; else rank 0, which may be elsewhere."""
    hosts, own, spanning = ["a", "a", "b", "b", "c", "c"], Server(1, 1, ("c",)), Server(2, 2, ("a", "b"))
    given: dict[str, Any] = {"bucket_bytes": 1, "timeout_s": 1.0}
    for transport in (
        SharedMemoryTransport(weights(), [own], hosts=hosts, **given),
        CudaIpcTransport(weights(), [own, spanning], hosts=hosts, **given),
    ):
        assert transport.leader_of(own) == 4
    assert transport.leader_of(spanning) == 0
    assert transport._ranks_of_sites() == [[0, 1, 2, 3], [4, 5]]
    assert DistributedTransport(weights(), [own], **given).leader_of(own) == 0


def test_config_offers_the_settings_of_the_choice() -> None:
    assert set(FIELDS["rollout.sglang.sync.transport"].metadata["choices"]) == set(choose._SETTINGS) - {"auto on GPUs"}


# --- single parts


def test_trainer_listens_where_the_server_looks() -> None:
    assert address_towards("http://127.0.0.1:30000") == "127.0.0.1"
    assert address_towards("http://localhost:30000") in ("127.0.0.1", "::1")
    assert address_for(["http://127.0.0.1:30000", "http://127.0.0.2:30000"]) == "127.0.0.1"


def test_cuda_handles_name_the_gpu_by_its_uuid() -> None:
    """The seventh argument of torch's rebuild_cuda_tensor is the device, as SGLang's patch of it says too."""
    import inspect

    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    assert list(inspect.signature(rebuild_cuda_tensor).parameters)[6] == "storage_device"
    assert with_uuid(range(9), "GPU-1") == (0, 1, 2, 3, 4, 5, "GPU-1", 7, 8)


def test_handles_travel_between_ranks_as_json() -> None:
    """Types travel by name: a rank that opens handles of others need not have one of its own."""
    sent = (
        torch.Tensor,
        torch.Size([8]),
        (1,),
        0,
        torch.TypedStorage,
        torch.uint8,
        "GPU-1",
        b"\x00\xff",
        8,
        0,
        False,
    )
    received = from_json(json.loads(json.dumps(as_json(sent))))
    assert received == sent
    assert [type(value) for value in received if not isinstance(value, tuple)] == [
        type(value) for value in sent if not isinstance(value, tuple)
    ]


@pytest.mark.gpu
def test_cuda_handle_carries_the_uuid() -> None:
    device = CudaDevice(torch.device("cuda"))
    _, arguments = device.opened(device.handle(torch.ones(4, device="cuda"))).__reduce__()  # type: ignore[attr-defined]
    assert arguments[6] == str(torch.cuda.get_device_properties(0).uuid)
