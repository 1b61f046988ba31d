"""Transport over process groups, to servers on any host: SGLang's `update_weights_from_distributed`, gloo or NCCL.

Rank 0 of the trainer gathers buckets and broadcasts each to every server. Each server has its own group (rank 0, then
the server's tensor-parallel ranks), so that one that dies breaks no other's; bytes leave rank 0 once for each server.
The first update makes the groups, and later ones keep them.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from mega_rl.rollout.sglang.http.request import ServerError
from mega_rl.rollout.sglang.weights.buckets import FORMAT, filled
from mega_rl.rollout.sglang.weights.reshard import Bucket
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

_SETTLE_S = 10.0  # for the trainer's side of a broadcast that the server says it has received


class DistributedTransport:
    """`transports.Transport` over process groups of rank 0 and each server."""

    name = "distributed"

    def __init__(
        self,
        weights: TrainerWeights,
        servers: Sequence[Server],
        *,
        bucket_bytes: int,
        timeout_s: float,
    ) -> None:
        """timeout_s: of a server's answer. A server's `receiver` is needed on rank 0."""
        self._weights, self._servers = weights, list(servers)
        self._bucket_bytes, self._timeout_s = bucket_bytes, timeout_s
        self._buckets = weights.buckets(bucket_bytes)
        self._world: Meeting | None = None
        self._links: dict[int, _Link] = {}

    def send(self, *, version: int, servers: Sequence[int] | None = None) -> SendReport:
        started = time.perf_counter()
        if self._world is None:
            timeout_s = self._timeout_s + GRACE_S
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
            self._world = Meeting(group, timeout_s=timeout_s)
        leads = dist.get_rank() == 0
        with ServerRequests(chosen(self._servers, servers) if leads else []) as requests:
            if leads:
                self._connect(requests)
            if self._weights.engine.place.gathers_first_copy:
                stream = self._weights.export(bucket_bytes=self._bucket_bytes)
                if leads:
                    self._broadcast(stream, requests, version)
                deque(stream, maxlen=0)  # gathering takes all ranks
            report = SendReport(
                bytes=sum(bucket.nbytes for bucket in self._buckets),
                buckets=len(self._buckets),
                tensors=sum(len(bucket.slots) for bucket in self._buckets),
            )
            report = requests.agree(report, self._world, leaders=[0], started=started)
        for index in report.failed:
            self._links.pop(index, None)  # the next update meets the server anew
        return report

    def close(self) -> None:
        with ServerRequests([server for server in self._servers if server.index in self._links]) as requests:
            requests.start(self._leave)
            requests.wait()  # a server that is gone has left its group
        self._links = {}
        if self._world is not None:
            self._world.close()
            self._world = None

    def _connect(self, requests: ServerRequests) -> None:
        """Make the groups that are missing, also with servers that have restarted."""

        def connect(server: Server, receiver: Receiver) -> None:
            backend = "nccl" if self._weights.device.type == "cuda" else "gloo"
            self._links[server.index] = _Link(server, receiver, backend, self._timeout_s)

        for server in requests.servers:
            link = self._links.get(server.index)
            if link is not None and server.receiver is not None and link.endpoint != server.receiver.endpoint:
                del self._links[server.index]
        requests.start(connect, only=[server for server in requests.servers if server.index not in self._links])
        requests.wait()

    def _broadcast(self, stream: Iterator[tuple[str, Tensor]], requests: ServerRequests, version: int) -> None:
        """Send every bucket while the next one is gathered; two buffers of the largest bucket's size."""
        room = max(bucket.nbytes for bucket in self._buckets)
        memory = [torch.empty(room, dtype=torch.uint8, device=self._weights.device) for _ in range(2)]
        last = self._buckets[-1]
        for bucket, data in filled(stream, self._buckets, lambda i, n: memory[i % 2][:n], self._weights.dtype):
            requests.wait()  # for the bucket before: the next one takes its place
            requests.start(_Send(self._links, bucket, data, self._weights.dtype, version if bucket is last else None))
        requests.wait()

    def _leave(self, server: Server, receiver: Receiver) -> None:
        receiver.destroy_group(self._links[server.index].name)


def address_towards(url: str) -> str:
    """Return the address of this machine's interface towards a server."""
    parts = urlsplit(url)
    family, kind, protocol, _, to = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(to)  # a datagram socket sends nothing by it
        return str(probe.getsockname()[0])


class _Send:
    """Sending of one bucket to one server: the request, and the broadcast that it announces."""

    def __init__(
        self, links: dict[int, _Link], bucket: Bucket, data: Tensor, dtype: torch.dtype, version: int | None
    ) -> None:
        self._links, self._data, self._version = links, data, version
        usual = str(dtype).removeprefix("torch.")
        self._names = [slot.name for slot in bucket.slots]
        self._dtypes = ["float32" if slot.float32 else usual for slot in bucket.slots]
        self._shapes = [slot.shape for slot in bucket.slots]

    def __call__(self, server: Server, receiver: Receiver) -> None:
        link = self._links[server.index]
        work = link.broadcast(self._data)
        try:
            receiver.update_from_distributed(
                names=self._names,
                dtypes=self._dtypes,
                shapes=self._shapes,
                group=link.name,
                load_format=FORMAT,
                version=self._version,
            )
            link.finish(work)
        except ServerError:
            link.abandon(work, self._data)
            raise


_numbers = itertools.count()


class _Link:
    """Process group of this rank (0) and one server's ranks, built as SGLang's `init_custom_process_group` does.

    As there, the store's keys have the group's name as prefix twice (once by torch), then the device. The group is not
    registered with torch.distributed, whose own groups end together with the world.
    """

    def __init__(self, server: Server, receiver: Receiver, backend: str, timeout_s: float) -> None:
        self.endpoint, self._timeout_s = receiver.endpoint, timeout_s
        self._address = address = address_towards(self.endpoint.url)
        self.name = f"mega_rl-weights-{os.getpid()}-{next(_numbers)}"
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family, backlog=server.tp + 1)
        port = listener.getsockname()[1]
        store = TCPStore(
            address,
            port,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),  # torch's own socket would listen on all interfaces
        )
        joined: Future[Any] = Future()
        # A daemon thread: if the server never joins, only the deadline ends it, and the process must not wait for it.
        join = threading.Thread(target=self._join, args=(joined, store, backend, server.tp + 1), daemon=True)
        join.start()
        receiver.init_group(
            address=address,
            port=port,
            rank_offset=1,
            world_size=server.tp + 1,
            group=self.name,
            backend=backend,
        )
        try:
            self._group = joined.result(timeout_s)
        except (TimeoutError, RuntimeError) as error:
            raise self._lost(
                "/init_weights_update_group", "the server has joined and the trainer has not", error
            ) from None

    def _join(self, joined: Future[Any], store: TCPStore, backend: str, size: int) -> None:
        try:
            joined.set_result(self._backend(store, backend, size))
        except RuntimeError as error:  # of torch.distributed: no peer, or the deadline
            joined.set_exception(error)

    def _backend(self, store: TCPStore, backend: str, size: int) -> Any:
        timeout = timedelta(seconds=self._timeout_s)
        named = PrefixStore(f"{self.name}/", PrefixStore(self.name, store))
        if backend == "gloo":
            kind: Any = dist.ProcessGroupGloo
            gloo = kind._Options()
            gloo._timeout = timeout
            gloo._devices = [kind.create_device(hostname=self._address)]
            return kind(PrefixStore("cpu/", named), 0, size, gloo)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(PrefixStore("cuda/", named), 0, size, options)

    def broadcast(self, data: Tensor) -> Any:
        """Start a broadcast of `data` [n] uint8 to the server's ranks; `data` must stay until `finish`."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        return self._group.broadcast([data], options)

    def finish(self, work: Any) -> None:
        """Wait for the end of a broadcast. Raises ServerError."""
        try:
            work.wait(timedelta(seconds=_SETTLE_S))
        except RuntimeError as error:
            path = "/update_weights_from_distributed"
            raise self._lost(path, "the server has the bucket, but the broadcast has not ended", error) from None

    def abandon(self, work: Any, data: Tensor) -> None:
        """Keep the group and data of a broadcast that may never end until its deadline, in a thread.

        The destructor of a gloo group waits for its broadcasts, and would block this process meanwhile.
        """

        def wait(_: Any, __: Tensor) -> None:
            with suppress(RuntimeError):  # the server's failure is reported already
                work.wait()

        threading.Thread(target=wait, args=(self._group, data), daemon=True).start()

    def _lost(self, path: str, what: str, error: BaseException) -> ServerError:
        return ServerError(self.endpoint, path, f"{what}: {type(error).__name__} {error}")
