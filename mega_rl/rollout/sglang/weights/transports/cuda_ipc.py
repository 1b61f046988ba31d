"""Weights through the memory of GPUs that the trainer's ranks share with servers: CUDA IPC.

Every rank assembles each bucket on its GPU, and the servers' tensor-parallel rank on the same GPU opens that memory by
its handle. Each bucket has a new buffer: SGLang may answer before its copies have ended, and torch frees a buffer only
after the process that opened it has released it.

Written from torch.multiprocessing.reductions and SGLang 0.5.20's srt/utils/patch_torch.py, which names GPUs by their
UUID, since processes count them differently. No machine with SGLang on a GPU has run this yet.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from mega_rl.rollout.sglang.weights.buckets import FORMAT, filled, payload
from mega_rl.rollout.sglang.weights.transport import (
    GRACE_S,
    Meeting,
    Receiver,
    SendReport,
    Server,
    ServerRequests,
    chosen,
)

if TYPE_CHECKING:
    from mega_rl.rollout.sglang.weights.source import TrainerWeights

_DEVICE_ARGUMENT = 6  # of rebuild_cuda_tensor: the number of the device


class CudaHandle:
    """Picklable handle of a CUDA tensor; another process opens it on the GPU of the same UUID."""

    def __init__(self, tensor: Tensor, uuid: str) -> None:
        self._tensor, self._uuid = tensor, uuid

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild, arguments = reduce_tensor(self._tensor)
        return rebuild, with_uuid(arguments, self._uuid)


def with_uuid(arguments: Sequence[Any], uuid: str) -> tuple[Any, ...]:
    """Return the arguments of rebuild_cuda_tensor with the device's UUID for its number."""
    changed = list(arguments)
    changed[_DEVICE_ARGUMENT] = uuid
    return tuple(changed)


class CudaIpcTransport:
    """`transports.Transport` on one host, where server i's rank t has the GPU of trainer rank `ranks[i][t]`."""

    name = "cuda_ipc"

    def __init__(
        self,
        weights: TrainerWeights,
        servers: Sequence[Server],
        *,
        ranks: Sequence[Sequence[int]],
        bucket_bytes: int,
        timeout_s: float,
    ) -> None:
        """timeout_s: of a server's answer. A server's `receiver` is needed on rank 0."""
        self._weights, self._servers = weights, list(servers)
        self._ranks = {server.index: list(own) for server, own in zip(servers, ranks, strict=True)}
        self._bucket_bytes, self._timeout_s = bucket_bytes, timeout_s + GRACE_S
        self._world: Meeting | None = None

    def send(self, *, version: int, servers: Sequence[int] | None = None) -> SendReport:
        started = time.perf_counter()
        if self._world is None:
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._timeout_s))
            self._world = Meeting(group, timeout_s=self._timeout_s)
        world, device, dtype = self._world, self._weights.device, self._weights.dtype
        to = chosen(self._servers, servers)
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        buckets = self._weights.buckets(self._bucket_bytes)
        stream = self._weights.export(bucket_bytes=self._bucket_bytes)

        def memory(_: int, nbytes: int) -> Tensor:
            return torch.empty(nbytes, dtype=torch.uint8, device=device)

        with ServerRequests(to if world.leads else []) as requests:
            held: deque[Tensor] = deque(maxlen=2)  # those that servers may not have opened yet
            for bucket, data in filled(stream, buckets, memory, dtype):
                held.append(data)
                torch.cuda.synchronize(device)
                own = payload(CudaHandle(data, uuid), bucket, dtype)
                texts = [world.broadcast(own, source=rank, what="to share handles") for rank in range(world.size)]
                requests.wait()
                requests.start(self._post(texts, version if bucket is buckets[-1] else None))
            requests.wait()
            slots = sum(len(bucket.slots) for bucket in buckets)
            report = SendReport(bytes=sum(b.nbytes for b in buckets), buckets=len(buckets), tensors=slots)
            report = requests.agree(report, world, leaders=[0], started=started)
        held.clear()
        torch.cuda.ipc_collect()
        return report

    def close(self) -> None:
        if self._world is not None:
            self._world.close()
            self._world = None

    def _post(self, texts: Sequence[str], version: int | None) -> Any:
        def post(server: Server, receiver: Receiver) -> None:
            own = [texts[rank] for rank in self._ranks[server.index]]
            receiver.update_from_tensor(own, load_format=FORMAT, version=version)

        return post
