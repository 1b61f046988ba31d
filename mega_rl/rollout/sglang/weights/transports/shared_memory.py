"""Transport through memory that a host's ranks and servers share. Linux.

Where the ranks of every host hold a whole copy of the model, each writes its parts of a bucket straight to their
places: without gathering, so that no rank holds more of the model than its part. Elsewhere all ranks gather each
bucket, and the first rank of each host writes it. That rank then sends each server of its host one request with the
place of the bytes. While servers load a bucket, the next one is written.

The memory is an anonymous file of the first rank (memfd_create(2)), which others open through /proc. Unlike a file of
/dev/shm it is not limited to the 64 MB of many containers, and leaves no name behind: the kernel frees it with the last
process that maps it, however the trainer ends. All processes must see one /proc and belong to one user.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from mega_rl.parallel.agreement import broadcast_json
from mega_rl.rollout.sglang.http.control import Control
from mega_rl.rollout.sglang.weights.buckets import FORMAT, MappedFile, filled, payload, write_parts
from mega_rl.rollout.sglang.weights.reshard import Bucket, ParamWrites, covers, writes
from mega_rl.rollout.sglang.weights.transport import (
    GRACE_S,
    SendReport,
    Server,
    ServerRequests,
    TrainerWeights,
    chosen,
    close_ranks,
    open_host_ranks,
)

_ALIGNMENT = 64  # bytes; of any dtype, and of a cache line


class SharedMemoryTransport:
    """`transports.Transport` through shared memory, on any number of hosts, each with ranks of the trainer."""

    name = "shared_memory"

    def __init__(
        self,
        weights: TrainerWeights,
        servers: Sequence[Server],
        *,
        hosts: Sequence[str],
        bucket_bytes: int,
        timeout_s: float,
    ) -> None:
        """hosts: of each rank of the run. timeout_s: longest that a server takes to answer, in seconds.

        A server's `receiver` is needed on the first rank of its host.
        """
        self._weights, self._servers, self._hosts = weights, list(servers), list(hosts)
        self._timeout_s = timeout_s + GRACE_S
        self._bucket_bytes = bucket_bytes
        self._open: _Opened | None = None

    @property
    def memory_bytes(self) -> int:
        """Return the bytes of shared memory on this host: two consecutive buckets, or 0 before the first `send`."""
        return 0 if self._open is None else self._open.memory.numel()

    def send(self, *, version: int, servers: Sequence[int] | None = None) -> SendReport:
        started = time.perf_counter()
        if self._open is None:
            self._open = _Opened(self._weights, self._hosts, bucket_bytes=self._bucket_bytes, timeout_s=self._timeout_s)
        opened = self._open
        to = chosen(self._servers, servers)
        here = [server for server in to if server.host == opened.host_name]
        with ServerRequests(here if opened.leads else []) as requests:
            for number in self._written(opened, to_host=bool(here)):
                requests.wait()  # for the bucket before this one: the one after this one takes its place
                if opened.parts is not None:
                    opened.host.max(torch.zeros(()))  # all ranks of the host have written their parts
                last = version if number == len(opened.buckets) - 1 else None
                requests.start(partial(_post, opened.payload(number), last))
            requests.wait()
            return requests.agree(SendReport.of(opened.buckets), opened.world, started=started)

    def _written(self, opened: _Opened, *, to_host: bool) -> Iterator[int]:
        """Yield the number of each bucket when this rank's part in writing it is done.

        Ranks that write no gathered bucket only take part. `to_host`: servers of this host need them.
        """
        weights = self._weights
        if opened.parts is not None:
            live = weights.live()
            for number, part in enumerate(opened.parts):
                if to_host or weights.sharded:
                    write_parts(part, live, opened.view(number), weights.dtype)
                yield number
            return
        stream = weights.export(bucket_bytes=self._bucket_bytes)
        if to_host and opened.leads:
            gathered = filled(stream, opened.buckets, lambda number, _: opened.view(number), weights.dtype)
            yield from (number for number, _ in enumerate(gathered))
        deque(stream, maxlen=0)  # gathering takes all ranks

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None


def _post(text: str, version: int | None, server: Server, receiver: Control) -> None:
    """Request one bucket, the same bytes for each rank of the server."""
    receiver.update_from_tensor([text] * server.tp, load_format=FORMAT, version=version)


class _Opened:
    """Plan, groups and memory, which the first `send` makes collectively and later ones reuse."""

    def __init__(self, weights: TrainerWeights, hosts: Sequence[str], *, bucket_bytes: int, timeout_s: float) -> None:
        rank = dist.get_rank()
        layout = weights.engine.sharding.layout
        self.host_name = hosts[rank]
        self.buckets: tuple[Bucket, ...] = weights.buckets(bucket_bytes)
        together = [other for other, host in enumerate(hosts) if host == self.host_name]
        # The same on all hosts: gathering takes the ranks of all.
        whole = all(
            covers(layout, [other for other, host in enumerate(hosts) if host == name], experts=weights.experts)
            for name in set(hosts)
        )
        self.parts: list[list[ParamWrites]] | None = None
        if whole:
            self.parts = writes(self.buckets, layout, rank=rank, ranks=together)
        self.world, self.host = open_host_ranks(hosts, timeout_s=timeout_s)
        self.leads = self.host.rank == 0
        self._dtype = weights.dtype
        self._offsets, size = _places(self.buckets)
        self._descriptor = _anonymous_file(size) if self.leads else -1
        path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        self._path: str = broadcast_json(path, self.host)
        self.memory: Tensor = torch.from_file(self._path, shared=True, size=size, dtype=torch.uint8)
        self._payloads: dict[int, str] = {}

    def view(self, number: int) -> Tensor:
        """Return the memory of a bucket, [nbytes] uint8."""
        at = self._offsets[number]
        return self.memory[at : at + self.buckets[number].nbytes]

    def payload(self, number: int) -> str:
        """Return a bucket's description for servers; the same at every update, since the memory stays in place."""
        if not self.leads:
            return ""
        if number not in self._payloads:
            bucket, at = self.buckets[number], self._offsets[number]
            mapped = MappedFile(self._path, at + bucket.nbytes)
            self._payloads[number] = payload(mapped, bucket, self._dtype, offset=at)
        return self._payloads[number]

    def close(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        if self._descriptor >= 0:
            os.close(self._descriptor)
        close_ranks(self.world, self.host)


def _places(buckets: Sequence[Bucket]) -> tuple[list[int], int]:
    """Return (offset of each bucket, bytes in all) such that no bucket overlaps the one before or after it.

    Buckets lie at the front and at the end in turn, so that it takes the largest sum of two neighbours: two buckets, or
    one and the largest group of tensors that stays together.
    """
    sizes = [bucket.nbytes for bucket in buckets]
    pairs = [first + second for first, second in zip(sizes, [*sizes[1:], 0], strict=True)]
    total = -(-(max(pairs) + _ALIGNMENT) // _ALIGNMENT) * _ALIGNMENT
    return [(total - size) // _ALIGNMENT * _ALIGNMENT if i % 2 else 0 for i, size in enumerate(sizes)], total


def _anonymous_file(size: int) -> int:
    """Return the descriptor of an anonymous file of `size` bytes, which child programs do not inherit."""
    descriptor = os.memfd_create("mega_rl-weights", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size)
    return descriptor
