"""Weights by CUDA IPC, through GPUs that the trainer's ranks share with servers.

Every rank assembles each bucket on its GPU, and the servers' tensor-parallel rank on the same GPU opens that memory by
its handle. The first rank of each site gathers its ranks' payloads, in one collective for each bucket that is also
their barrier, and speaks with the site's servers. While servers load a bucket the ranks gather the next one.

Sharing a tensor records an event, for which the receiver's stream waits; torch frees a buffer only once the receiver
has counted its handle down. So each bucket is shared anew, and only on ranks whose server will open it: memory with a
handle that nobody opens is never freed. Written from torch.multiprocessing.reductions and SGLang 0.5.21's
srt/utils/patch_torch.py, which names GPUs by their UUID. No machine with SGLang on a GPU has run this yet.
"""

from __future__ import annotations

import base64
import pickle
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from mega_rl.parallel.agreement import broadcast_json
from mega_rl.rollout.sglang.control import Control
from mega_rl.rollout.sglang.weights.reshard import Bucket
from mega_rl.rollout.sglang.weights.transport import (
    FORMAT,
    GRACE_S,
    Server,
    ServerRequests,
    TrainerWeights,
    Transport,
    filled,
    open_ranks,
)

Reduced = tuple[Callable[..., object], tuple[object, ...]]  # function and arguments of a pickle

_DEVICE_ARGUMENT = 6  # place among rebuild_cuda_tensor's arguments: the number of the device


class Handle:
    """Picklable by the function and the arguments that it is given."""

    def __init__(self, reduced: Reduced) -> None:
        self._reduced = reduced

    def __reduce__(self) -> Reduced:
        return self._reduced


class CudaDevice:
    """Memory of this rank's device that another process on it can open, by handles as torch.multiprocessing's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._uuid = str(torch.cuda.get_device_properties(device).uuid)

    def memory(self, nbytes: int) -> Tensor:
        """Return new memory, [nbytes] uint8."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def handle(self, data: Tensor) -> Handle:
        """Return an object that unpickles to `data` after the work that is queued on the device.

        A process must open it once: until then `data` keeps its memory.
        """
        arguments = list(reduce_tensor(data)[1])
        arguments[_DEVICE_ARGUMENT] = self._uuid
        return Handle((rebuild_cuda_tensor, tuple(arguments)))

    def close(self) -> None:
        """Free the memory that receivers have released."""
        torch.cuda.ipc_collect()


def payload(data: object, bucket: Bucket, dtype: torch.dtype) -> str:
    """Return a bucket in SGLang's load format for one tensor-parallel rank of a server, base64 text.

    SGLang's unpickler (SafeUnpickler in srt/utils/common.py) admits the names of a list only; those used here are
    among them. None is SGLang's own: of a tensor's metadata SGLang reads attributes only.

    `data`: unpickles to a uint8 tensor of the bucket's bytes; `dtype`: of all but the float32 slots.
    """
    metadata = [
        SimpleNamespace(
            name=slot.name,
            shape=torch.Size(slot.shape),
            dtype=torch.float32 if slot.float32 else dtype,
            start_idx=slot.start,
            end_idx=slot.end,
            numel=slot.end - slot.start,
        )
        for slot in bucket.slots
    ]
    content = {"flattened_tensor": data, "metadata": metadata}
    return base64.b64encode(pickle.dumps(content, protocol=4)).decode("ascii")


def ranks_of_servers(servers: Collection[Server], hosts: Sequence[int]) -> dict[int, list[int]]:
    """Return by server the trainer's ranks on the GPUs of its tensor-parallel ranks.

    hosts: of each rank. Servers of a host have its GPUs one after the other, and so have ranks; a server on several
    hosts has an equal share of its ranks on each.
    """
    free = {host: [rank for rank, other in enumerate(hosts) if other == host] for host in set(hosts)}
    ranks: dict[int, list[int]] = {}
    for server in servers:
        ranks[server.index] = []
        for host in server.hosts:
            left, share = free[host], server.tp // len(server.hosts)
            ranks[server.index] += left[:share]
            del left[:share]
    return ranks


class CudaIpcTransport(Transport):
    """`Transport` to servers on the GPUs of the trainer's ranks.

    The ranks of a site send together to its servers: hosts that one server spans are one site, any other host its own.
    """

    def __init__(
        self,
        weights: TrainerWeights,
        servers: Collection[Server],
        *,
        hosts: Sequence[int],
        bucket_bytes: int,
        timeout_s: float,
        device: CudaDevice | None = None,
    ) -> None:
        """hosts: of each rank of the run. device: None takes the weights'."""
        super().__init__(weights, servers, bucket_bytes=bucket_bytes, timeout_s=timeout_s)
        site = {host: server.hosts[0] for server in servers for host in server.hosts}
        self._sites = [site.get(host, host) for host in hosts]
        self._ranks, self._device = ranks_of_servers(servers, hosts), device
        # The bucket that servers load and the one before it, which they have answered; a third is being filled.
        self._held: deque[Tensor] = deque(maxlen=2)

    def leader_of(self, server: Server) -> int:
        return self._sites.index(server.hosts[0])

    def _open(self) -> None:
        timeout_s, sites = self._timeout_s + GRACE_S, sorted(set(self._sites))
        parts = [[rank for rank, site in enumerate(self._sites) if site == name] for name in sites]
        self._world = open_ranks(timeout_s=timeout_s)
        self._part = open_ranks(parts, timeout_s=timeout_s) if len(parts) > 1 else self._world

    def send(self, *, version: int, servers: Sequence[int] | None = None) -> dict[int, str]:
        failed = super().send(version=version, servers=servers)
        self._held.clear()  # all ranks have met since: every server has answered the last bucket
        self._on_device().close()
        return failed

    def _on_device(self) -> CudaDevice:
        self._device = self._device or CudaDevice(self._weights.engine.device)
        return self._device

    def _send_buckets(self, requests: ServerRequests, servers: Sequence[Server], version: int) -> None:
        device, stream = self._on_device(), self._weights.export(bucket_bytes=self._bucket_bytes)
        leader = self._sites.index(self._sites[self._world.rank])
        here = [server for server in servers if self.leader_of(server) == leader]
        for bucket, data in filled(stream, self.buckets, lambda _, n: device.memory(n), self._weights.dtype):
            self._held.append(data)
            requests.wait()
            failed = broadcast_json(list(requests.failed), self._part)
            opens = any(self._world.rank in self._ranks[one.index] for one in here if one.index not in failed)
            own = payload(device.handle(data), bucket, self._weights.dtype) if opens else None
            payloads = self._part.gather_json(own)
            if requests.servers:
                last = version if bucket is self.buckets[-1] else None
                requests.start(partial(self._post, payloads, last))
        requests.wait()

    def _post(self, payloads: Sequence[str], version: int | None, server: Server, receiver: Control) -> None:
        """Let a server load one bucket; payloads: of the site's ranks."""
        site = [rank for rank, name in enumerate(self._sites) if name == self._sites[self._world.rank]]
        of_server = [payloads[site.index(rank)] for rank in self._ranks[server.index]]
        receiver.update_from_tensor(of_server, load_format=FORMAT, version=version)
