"""The parts of transports that need no second rank: payloads, requests, the choice, who leads, handles."""

from __future__ import annotations

import base64
import pickle
import pickletools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from mega_rl.config.schema import RolloutConfig
from mega_rl.parallel.comm import SingleRank
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.rollout.sglang import build
from mega_rl.rollout.sglang.weights.cuda_ipc import (
    _DEVICE_ARGUMENT,
    CudaDevice,
    CudaIpcTransport,
    Handle,
    payload,
    ranks_of_servers,
)
from mega_rl.rollout.sglang.weights.process_group import DistributedTransport
from mega_rl.rollout.sglang.weights.reshard import Bucket, Slot
from mega_rl.rollout.sglang.weights.transport import Server, ServerRequests, slot_tensor
from tests.helpers.weight_receiver import FakeReceiver
from tests.unit_tests.distributed.test_weight_resharding import HostDevice

# What our payloads need of SafeUnpickler.ALLOWED_GLOBALS of SGLang 0.5.21 (srt/utils/common.py), which are exact names.
ADMITTED = {
    ("types", "SimpleNamespace"),
    ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"),
    ("torch.storage", "TypedStorage"),
    *(("torch", name) for name in ("Size", "Tensor", "bfloat16", "float16", "float32", "uint8")),
}

UNUSED: Any = None  # a receiver
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


def test_payload_says_where_tensors_are() -> None:
    """What unpickles are the bucket's bytes, as SGLang cuts them."""
    device = HostDevice()
    flat = device.memory(24)
    gate, w = torch.tensor([1.0, -2.0, 3.0]), torch.arange(6.0).view(2, 3).bfloat16()
    slot_tensor(flat, BUCKET.slots[0], torch.bfloat16).copy_(gate)
    slot_tensor(flat, BUCKET.slots[1], torch.bfloat16).copy_(w)
    content = pickle.loads(base64.b64decode(payload(device.handle(flat), BUCKET, torch.bfloat16)))
    actual = {
        meta.name: content["flattened_tensor"][meta.start_idx : meta.end_idx].view(meta.dtype).reshape(meta.shape)
        for meta in content["metadata"]
    }
    assert torch.equal(actual["gate"], gate)
    assert torch.equal(actual["w"], w)
    assert [meta.numel for meta in content["metadata"]] == [12, 12]


def test_payload_has_no_name_that_sglang_refuses() -> None:
    """Of a handle as torch makes it on a GPU; and none of SGLang's, which is not installed here."""
    arguments = (torch.Tensor, torch.Size([8]), (1,), 0, torch.TypedStorage, torch.uint8, "GPU-1", b"", 8, 0, False)
    names = globals_in(payload(Handle((rebuild_cuda_tensor, arguments)), BUCKET, torch.bfloat16))
    assert {("types", "SimpleNamespace"), ("torch.multiprocessing.reductions", "rebuild_cuda_tensor")} <= names
    assert names <= ADMITTED


# --- requests


def servers(*receivers: FakeReceiver) -> list[Server]:
    return [Server(i, 1, (0,), receiver) for i, receiver in enumerate(receivers)]


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
        dtype=torch.bfloat16,
        engine=SimpleNamespace(sharding=sharding, device=torch.device(device)),
        buckets=lambda nbytes, by_stage=False: (),
    )


@pytest.mark.parametrize(
    ("device", "colocated", "transport"),
    [
        ("cuda", True, CudaIpcTransport),
        ("cuda", False, DistributedTransport),
        ("cpu", True, DistributedTransport),
        ("cpu", False, DistributedTransport),
    ],
)
def test_shared_devices_have_cuda_ipc(device: str, colocated: bool, transport: type) -> None:
    rollout: Any = RolloutConfig(bucket_mib=1)
    pool: Any = SimpleNamespace(colocated=colocated, ranks_per_host=2)
    servers = [Server(0, 2, (0,), UNUSED)]
    made = build._transport(rollout, weights(device), pool, servers, SimpleNamespace(size=2))  # type: ignore[arg-type]
    assert type(made) is transport


def test_servers_take_gpus_of_ranks_on_their_host() -> None:
    """A spanning one equal shares of its hosts, in the order of its nodes."""
    servers = [Server(0, 2, (0,), UNUSED), Server(1, 2, (1,), UNUSED), Server(2, 1, (0,), UNUSED)]
    assert ranks_of_servers(servers, [0, 0, 1, 0, 1]) == {0: [0, 1], 1: [2, 4], 2: [3]}
    servers = [Server(0, 2, (1, 0), UNUSED), Server(1, 2, (1, 0), UNUSED), Server(2, 2, (2,), UNUSED)]
    assert ranks_of_servers(servers, [0, 0, 1, 1, 2, 2]) == {0: [2, 0], 1: [3, 1], 2: [4, 5]}


# --- single parts


def test_cuda_handles_name_the_gpu_by_its_uuid() -> None:
    """The seventh argument of torch's rebuild_cuda_tensor is the device, as SGLang's patch of it says too."""
    import inspect

    assert list(inspect.signature(rebuild_cuda_tensor).parameters)[6] == "storage_device"
    assert _DEVICE_ARGUMENT == 6


@pytest.mark.gpu
def test_cuda_handle_carries_the_uuid() -> None:
    device = CudaDevice(torch.device("cuda"))
    bucket = torch.ones(4, dtype=torch.uint8, device="cuda")
    _, arguments = device.handle(bucket).__reduce__()
    assert arguments[6] == str(torch.cuda.get_device_properties(0).uuid)
