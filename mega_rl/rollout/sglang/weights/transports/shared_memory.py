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
from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mega_rl.parallel.agreement import broadcast_json
from mega_rl.rollout.sglang.http.control import Control
from mega_rl.rollout.sglang.weights.buckets import FORMAT, MappedFile, filled, payload, write_parts
from mega_rl.rollout.sglang.weights.reshard import Bucket, covers, writes
from mega_rl.rollout.sglang.weights.transport import Server, ServerRequests, Transport

_ALIGNMENT = 64  # bytes; of any dtype, and of a cache line


class SharedMemoryTransport(Transport):
    """`Transport` through shared memory, on any number of hosts, each with ranks of the trainer."""

    name = "shared_memory"

    def _open(self) -> None:
        super()._open()
        sharding, hosts = self._weights.engine.sharding, self._ranks_of_sites()
        # The same on all hosts: gathering takes the ranks of all.
        whole = all(covers(sharding.layout, ranks, experts=sharding.hf.moe is not None) for ranks in hosts)
        rank = self._world.rank
        (together,) = (ranks for ranks in hosts if rank in ranks)
        self._writes = writes(self.buckets, sharding.layout, rank=rank, ranks=together) if whole else None
        self._offsets, size = _places(self.buckets)
        self._descriptor = _anonymous_file(size) if self._part.rank == 0 else -1
        self._path: str = broadcast_json(f"/proc/{os.getpid()}/fd/{self._descriptor}", self._part)
        self._memory: Tensor = torch.from_file(self._path, shared=True, size=size, dtype=torch.uint8)

    def _send_buckets(self, requests: ServerRequests, servers: Sequence[Server], version: int) -> None:
        for number in self._written(to_host=bool(servers)):
            requests.wait()  # for the bucket before this one: the one after this one takes its place
            if self._writes is not None:
                self._part.max(torch.zeros(()))  # all ranks of the host have written their parts
            if requests.servers:
                self._post(requests, number, version)
        requests.wait()

    def _post(self, requests: ServerRequests, number: int, version: int) -> None:
        """Start the requests for one bucket, the same bytes for each rank of a server."""
        bucket, offset = self.buckets[number], self._offsets[number]
        text = payload(MappedFile(self._path, offset + bucket.nbytes), bucket, self._weights.dtype, offset=offset)
        last = version if bucket is self.buckets[-1] else None

        def post(server: Server, receiver: Control) -> None:
            receiver.update_from_tensor([text] * server.tp, load_format=FORMAT, version=last)

        requests.start(post)

    def _written(self, *, to_host: bool) -> Iterator[int]:
        """Yield the number of each bucket when this rank's part in writing it is done.

        Ranks that write no gathered bucket only take part. `to_host`: servers of this host need them.
        """
        weights = self._weights
        if self._writes is not None:
            live = weights.live()
            for number, part in enumerate(self._writes):
                if to_host or weights.engine.is_sharded:
                    write_parts(part, live, self._view(number), weights.dtype)
                yield number
            return
        stream = weights.export(bucket_bytes=self._bucket_bytes)
        if to_host and self._part.rank == 0:
            gathered = filled(stream, self.buckets, lambda number, _: self._view(number), weights.dtype)
            yield from (number for number, _ in enumerate(gathered))
        deque(stream, maxlen=0)  # gathering takes all ranks

    def _view(self, number: int) -> Tensor:
        """Return the memory of a bucket, [nbytes] uint8."""
        at = self._offsets[number]
        return self._memory[at : at + self.buckets[number].nbytes]

    def close(self) -> None:
        if self._is_open:
            self._memory = torch.empty(0, dtype=torch.uint8)
            if self._descriptor >= 0:
                os.close(self._descriptor)
        super().close()


def _places(buckets: Sequence[Bucket]) -> tuple[list[int], int]:
    """Return (offset of each bucket, bytes in all) without overlap of neighbours.

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
