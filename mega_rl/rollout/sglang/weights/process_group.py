"""Weights over process groups, to servers on any host: SGLang's `update_weights_from_distributed`, gloo or NCCL.

Each pipeline stage has a source, its first rank, which gathers the stage's weights and is in one group with all ranks
of all servers. Rank 0 announces each bucket by requests. Stages send in turn, and each gathers its next bucket
while others send. The first update makes the groups, and later ones to the same servers keep them.

Servers in one broadcast wait for each other. When one fails, those that wait for it are freed, the rest form new
groups, and the bucket is sent again. A server that hangs inside a broadcast can take others with it, which then count
as failed and are refit like it.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from mega_rl.parallel.agreement import broadcast_json
from mega_rl.parallel.comm import GroupRanks
from mega_rl.rollout.sglang.control import Control, Endpoint, ServerError
from mega_rl.rollout.sglang.server.addresses import address_for
from mega_rl.rollout.sglang.weights.reshard import Bucket, first_ranks
from mega_rl.rollout.sglang.weights.transport import (
    FORMAT,
    GRACE_S,
    GroupRelease,
    Server,
    ServerRequests,
    Transport,
    filled,
    open_ranks,
)

_ATTEMPTS = 3  # how often groups may break in one update
_SETTLE_S = 10.0  # for the trainer's side of a broadcast that all servers have answered
_numbers = itertools.count()
Meeting = dict[str, Any]  # arguments of `join_group`, as JSON


class DistributedTransport(Transport):
    """`Transport` over a group of each stage's source and all servers; rank 0 leads."""

    _by_stage = True
    _groups: _Groups | None = None  # on sources

    def _open(self) -> None:
        # Between two collectives rank 0 waits for one answer, and for one more where servers leave groups. Ranks that
        # send nothing wait for the whole update.
        self._world = open_ranks(timeout_s=2 * _ATTEMPTS * self._timeout_s + GRACE_S)
        sources = first_ranks(self._weights.engine.sharding.layout)
        others = sorted(set(range(self._world.size)) - set(sources))
        self._part = open_ranks([sources, others] if others else (), timeout_s=2 * self._timeout_s + GRACE_S)
        if self._world.rank in sources:
            backend = "nccl" if self._weights.engine.device.type == "cuda" else "gloo"
            stage = self._weights.engine.place.coordinates.pp_rank
            self._groups = _Groups(self._part, stage, backend=backend, timeout_s=self._timeout_s)

    def _send_buckets(self, requests: ServerRequests, servers: Sequence[Server], version: int) -> None:
        if self._weights.engine.place.gathers_first_copy:
            stream = self._weights.export(bucket_bytes=self._bucket_bytes, own_stage=True)
            if self._groups is not None:
                self._send_all(requests, self._groups, self._staged(stream, self._groups.stage), version)
            deque(stream, maxlen=0)  # gathering takes all ranks

    def close(self) -> None:
        if self._groups is not None:
            self._groups.leave()
        self._groups = None
        super().close()

    def _staged(self, stream: Iterator[tuple[str, Tensor]], stage: int) -> Iterator[tuple[Bucket, Tensor]]:
        """Yield this stage's buckets; two of them are in memory at once."""
        own = [bucket for bucket in self.buckets if bucket.pp_rank == stage]
        room = max(bucket.nbytes for bucket in own)
        memory = [torch.empty(room, dtype=torch.uint8, device=self._weights.engine.device) for _ in range(2)]
        return filled(stream, own, lambda i, n: memory[i % 2][:n], self._weights.dtype)

    def _send_all(
        self, requests: ServerRequests, groups: _Groups, staged: Iterator[tuple[Bucket, Tensor]], version: int
    ) -> None:
        """Send all stages' buckets in order; take all of this stage's in any case."""
        breaks = 0
        joined = groups.join(requests)
        waiting = next(staged, None)
        for bucket in self.buckets:
            is_own = waiting is not None and waiting[0] is bucket
            data = waiting[1] if waiting is not None and is_own else None
            while joined:
                own = groups.broadcast(data)
                if groups.leads:
                    last = version if bucket is self.buckets[-1] else None
                    self._announce(requests, bucket, groups.names[bucket.pp_rank], last)
                if is_own:
                    waiting, is_own = next(staged, None), False  # while servers take this one
                if groups.settled(requests, own):
                    break
                breaks += 1
                if breaks == _ATTEMPTS and groups.leads:
                    requests.fail_all(f"its process groups broke {_ATTEMPTS} times in one update")
                groups.forget()  # servers have left: `_Groups.release`
                joined = groups.join(requests)
            if is_own:
                waiting = next(staged, None)

    def _announce(self, requests: ServerRequests, bucket: Bucket, group: str, version: int | None) -> None:
        """Start the requests that announce one bucket to all servers."""
        usual = str(self._weights.dtype).removeprefix("torch.")

        def announce(_: Server, receiver: Control) -> None:
            receiver.update_from_distributed(
                names=[slot.name for slot in bucket.slots],
                dtypes=["float32" if slot.float32 else usual for slot in bucket.slots],
                shapes=[slot.shape for slot in bucket.slots],
                group=group,
                load_format=FORMAT,
                version=version,
            )

        requests.start(announce)


class _Groups:
    """One group of all servers for each stage. Methods are collective over the senders."""

    def __init__(self, senders: GroupRanks, stage: int, *, backend: str, timeout_s: float) -> None:
        """senders: the sources, whose first is rank 0; stage: of this rank."""
        self._senders, self.stage = senders, stage
        self.leads = senders.rank == 0
        self.names: list[str] = []
        self._own: Any = None  # torch's group of this rank's stage
        self._backend, self._timeout_s = backend, timeout_s
        self._rendezvous: Rendezvous | None = None
        self._members: list[tuple[Server, Endpoint]] = []  # on rank 0

    def join(self, requests: ServerRequests) -> bool:
        """Make groups of all servers of `requests` that are left, unless these stand.

        Returns whether there are any; the others have failed.
        """
        for _ in range(_ATTEMPTS):
            meeting: Meeting | None = broadcast_json(self._meet(requests), self._senders)
            if not meeting:
                return meeting is not None
            if self._make(requests, meeting):
                return True
            self.leave(but=requests.failed)
        if self.leads:
            requests.fail_all(f"no process group with it came about in {_ATTEMPTS} attempts")
        return False

    def leave(self, *, but: Container[int] = ()) -> None:
        """End the groups; no collective. The servers leave them too, except those in `but`."""
        with ServerRequests([server for server, _ in self._members if server.index not in but]) as requests:
            requests.start(lambda server, _: self._leave(server))
            requests.wait()  # one that does not answer has left or will not: either way it is in no later group
        self.forget()

    def forget(self) -> None:
        """End this rank's side of the groups."""
        if self._own is not None:
            with suppress(RuntimeError):  # it may be broken already
                self._own.abort()  # peers that wait for this rank get an error
        if self._rendezvous is not None:
            self._rendezvous.close()
        self._own, self._rendezvous, self._members, self.names = None, None, [], []

    def broadcast(self, data: Tensor | None) -> Future[Any] | None:
        """Start to send this stage's bucket, [n] uint8, if any; do not change it meanwhile.

        On a thread, because the first broadcast over NCCL waits for its peers.
        """
        if data is None:
            return None
        group, options = self._own, dist.BroadcastOptions()
        options.rootRank = 0
        return _on_a_thread(lambda: group.broadcast([data], options).wait(timedelta(seconds=self._timeout_s)))

    def settled(
        self, requests: ServerRequests, own: Future[Any] | None, *, release: GroupRelease | None = None
    ) -> bool:
        """Return whether all servers succeeded and this rank's part, `own`, has ended too."""
        good = requests.wait_together(release or self._release) if self.leads else True
        good = broadcast_json(good, self._senders)
        failed = False
        if good and own is not None:
            try:
                own.result(_SETTLE_S)
            except (OSError, RuntimeError):  # TimeoutError among them
                failed = True  # the servers are in the group of a peer that is gone
        return good and not self._senders.max(torch.tensor(int(failed)))

    def _release(self, server: Server, error: BaseException | None) -> None:
        """Let a server that answers leave the groups, so that its peers stop waiting."""
        if not isinstance(error, ServerError) or error.status is not None:
            with suppress(ServerError):  # its failure, if it has one, is known already
                self._leave(server)

    def _leave(self, server: Server) -> None:
        for name in self.names:
            try:
                server.receiver.destroy_group(name)
            except ServerError as error:  # with an answer: it is in no such group
                if error.status is None:
                    raise

    def _meet(self, requests: ServerRequests) -> Meeting | None:
        """Return on rank 0 the arguments of `join_group` for new groups; elsewhere nothing of use.

        Empty where the groups have these servers already, None where no server is left.
        """
        members = [(server, server.receiver.endpoint) for server in requests.servers]
        if not members or (self.names and members == self._members):
            return {} if members else None
        self.leave()
        urls = [endpoint.url for _, endpoint in members]
        try:
            self._rendezvous = Rendezvous(urls, timeout_s=self._timeout_s)
        except (OSError, RuntimeError) as error:
            requests.fail_all(f"no port to meet it at: {error}")
            return None
        self._members = members
        return {
            "name": f"mega_rl-weights-{os.getpid()}-{next(_numbers)}",
            "size": 1 + sum(server.tp for server, _ in members),
            "address": self._rendezvous.address,
            "port": self._rendezvous.port,
            "towards": urls,
        }

    def _make(self, requests: ServerRequests, meeting: Meeting) -> bool:
        """Make the group of every stage; return whether all came about."""
        if not self.leads:
            self.forget()
        for stage in range(self._senders.size):
            own = {**meeting, "name": f"{meeting['name']}-{stage}", "backend": self._backend}
            self.names.append(own["name"])
            joined = join_group(**own, timeout_s=self._timeout_s) if stage == self.stage else None
            if self.leads:
                assert self._rendezvous is not None
                self._rendezvous.expect(own["size"])
                self._invite(requests, **own)
            if not self.settled(requests, joined, release=lambda *_: self._end_rendezvous(requests.failed)):
                return False
            self._own = self._own if joined is None else joined.result()
        return True

    def _invite(self, requests: ServerRequests, *, name: str, size: int, address: str, port: int, **_: object) -> None:
        """Start the requests to join a stage's group."""
        ends = itertools.accumulate((server.tp for server, _ in self._members), initial=1)
        offsets = {server.index: end for (server, _), end in zip(self._members, ends, strict=False)}

        def invite(server: Server, receiver: Control) -> None:
            offset, backend = offsets[server.index], self._backend
            receiver.init_group(
                address=address, port=port, rank_offset=offset, world_size=size, group=name, backend=backend
            )

        requests.start(invite)

    def _end_rendezvous(self, failed: Container[int]) -> None:
        """Let servers no longer wait for those that have failed."""
        assert self._rendezvous is not None
        self._rendezvous.close(absent=sum(server.tp for server, _ in self._members if server.index in failed))


class Rendezvous:
    """Store on one rank of the trainer at which the members of groups meet."""

    def __init__(self, urls: Sequence[str], *, timeout_s: float) -> None:
        """Listen where these servers reach this machine, on a free port."""
        self.address = address_for(urls)
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        listener = socket.create_server((self.address, 0), family=family, backlog=128)
        self.port: int = listener.getsockname()[1]
        self._keys = 0  # in the store once the expected group is complete
        self._store: TCPStore | None = TCPStore(
            self.address,
            self.port,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),  # torch's own socket would listen on all interfaces
        )

    def expect(self, members: int) -> None:
        """Take note that the next group has this many members, each of which leaves a key."""
        if self._store is not None:
            # One key counts the store's clients: torch makes it when the first of them comes.
            self._keys = max(1, self._store.num_keys()) + members

    def close(self, *, absent: int = 0) -> None:
        """End the store: whoever waits there for others gets an error at once.

        `absent`: members of the expected group that will not come, for which the others would wait. First let these
        arrive, for at most `_SETTLE_S` seconds: a member that finds no store tries again until its own deadline.
        """
        store, self._store = self._store, None
        deadline = time.monotonic() + _SETTLE_S
        while store is not None and absent and store.num_keys() < self._keys - absent and time.monotonic() < deadline:
            time.sleep(0.02)


def join_group(
    *, name: str, size: int, address: str, port: int, towards: Sequence[str], backend: str, timeout_s: float
) -> Future[Any]:
    """Start to join the broadcast group: rank 0 is this one, the others are the servers'.

    Built as SGLang's `init_custom_process_group` builds the servers' side: the store's keys have the group's name as
    prefix twice (once by torch), then the device. Not registered with torch.distributed, whose own groups end together
    with the world.

    size: ranks, this one among them. towards: the servers' URLs. The future raises OSError or RuntimeError.
    """

    def join() -> Any:
        timeout = timedelta(seconds=timeout_s)
        store = TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)
        kind: Any = dist.ProcessGroupGloo if backend == "gloo" else dist.ProcessGroupNCCL
        options = kind._Options() if backend == "gloo" else kind.Options()
        options._timeout = timeout
        if backend == "gloo":
            options._devices = [kind.create_device(hostname=address_for(towards))]
        device = "cpu/" if backend == "gloo" else "cuda/"
        return kind(PrefixStore(device, PrefixStore(f"{name}/", PrefixStore(name, store))), 0, size, options)

    return _on_a_thread(join)


def _on_a_thread(work: Callable[[], Any]) -> Future[Any]:
    """Return the future of work on a daemon thread."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except (OSError, RuntimeError) as error:  # sockets' and torch.distributed's
            future.set_exception(error)

    threading.Thread(target=run, name="weight-group", daemon=True).start()
    return future
