"""Transport over process groups, to servers on any host: SGLang's `update_weights_from_distributed`, gloo or NCCL.

Each pipeline stage of the trainer has a source, its first rank, which gathers the stage's weights from the ranks that
hold them; no weight crosses stages. The source and all ranks of all servers are one group, so that a broadcast leaves
the source once (over gloo, whose broadcast is a binary tree, once for each level). Rank 0 sends the requests that
announce each bucket, one to each server. Stages send in turn, and each gathers its next bucket while others send.

Servers in one broadcast wait for each other. When one fails, those that wait for it are freed, the rest form new
groups, and the bucket is sent again. That takes answers: a server that hangs inside a broadcast, or one that dies while
NCCL waits for it, can take others with it, which then count as failed and are refit like it.

The first update makes the groups, and later ones to the same servers keep them.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from collections.abc import Container, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from mega_rl.rollout.sglang.http.keys import Endpoint
from mega_rl.rollout.sglang.http.request import ServerError
from mega_rl.rollout.sglang.weights.buckets import FORMAT, filled
from mega_rl.rollout.sglang.weights.reshard import Bucket, first_ranks
from mega_rl.rollout.sglang.weights.transport import (
    GRACE_S,
    GroupRelease,
    Meeting,
    Receiver,
    SendReport,
    Server,
    ServerRequests,
    chosen,
    open_meeting,
)
from mega_rl.rollout.sglang.weights.transports.server_group import SETTLE_S, Rendezvous, ServerGroup

if TYPE_CHECKING:
    from mega_rl.rollout.sglang.weights.source import TrainerWeights

_ATTEMPTS = 3  # how often groups may break in one update
_numbers = itertools.count()


class DistributedTransport:
    """`transports.Transport` over a process group of each stage's source and all servers."""

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
        self._buckets = weights.buckets(bucket_bytes, by_stage=True)
        self._sources = first_ranks(weights.engine.sharding.layout)
        self._world: Meeting | None = None
        self._part: Meeting | None = None  # ranks that send, or all others
        self._groups: _Groups | None = None

    @property
    def group_names(self) -> list[str]:
        """Return the names of the groups that servers are in, as rank 0 knows them."""
        return [] if self._groups is None else list(self._groups.names)

    def send(self, *, version: int, servers: Sequence[int] | None = None) -> SendReport:
        started = time.perf_counter()
        if self._world is None:
            self._open()
        assert self._world is not None
        with ServerRequests(chosen(self._servers, servers) if self._world.leads else []) as requests:
            if self._weights.engine.place.gathers_first_copy:
                stream = self._weights.export(bucket_bytes=self._bucket_bytes, own_stage=True)
                if self._groups is not None:
                    own = [bucket for bucket in self._buckets if bucket.pp_rank == self._groups.stage]
                    update = _Update(requests, self._groups, self._staged(stream, own), version, self._weights.dtype)
                    update.send_all(self._buckets)
                deque(stream, maxlen=0)  # gathering takes all ranks
            report = SendReport(
                bytes=sum(bucket.nbytes for bucket in self._buckets),
                buckets=len(self._buckets),
                tensors=sum(len(bucket.slots) for bucket in self._buckets),
            )
            return requests.agree(report, self._world, leaders=[0], started=started)

    def close(self) -> None:
        if self._groups is not None:
            self._groups.leave()
        for meeting in (self._part, self._world):
            if meeting is not None:
                meeting.close()
        self._groups = self._part = self._world = None

    def _open(self) -> None:
        # Between two meetings rank 0 waits for one answer, and for one more where servers leave groups; ranks that send
        # nothing wait for the whole update.
        self._world = open_meeting(timeout_s=2 * _ATTEMPTS * self._timeout_s + GRACE_S)
        others = sorted(set(range(self._world.size)) - set(self._sources))
        parts = [self._sources, others] if others else []
        self._part = open_meeting(parts, timeout_s=2 * self._timeout_s + GRACE_S)
        if self._world.rank in self._sources:
            backend = "nccl" if self._weights.device.type == "cuda" else "gloo"
            stage = self._weights.engine.place.coordinates.pp_rank
            self._groups = _Groups(self._part, stage, backend=backend, timeout_s=self._timeout_s)

    def _staged(self, stream: Iterator[tuple[str, Tensor]], own: Sequence[Bucket]) -> Iterator[tuple[Bucket, Tensor]]:
        """Yield this stage's buckets in two buffers of the largest one's size."""
        room = max(bucket.nbytes for bucket in own)
        memory = [torch.empty(room, dtype=torch.uint8, device=self._weights.device) for _ in range(2)]
        return filled(stream, own, lambda i, n: memory[i % 2][:n], self._weights.dtype)


@dataclass(frozen=True)
class _Plan:
    """Servers of the groups, and where their members meet; the same on all ranks that send."""

    any_server: bool
    fresh: bool = False  # else the groups are those that there are
    urls: Sequence[str] = ()
    size: int = 0  # ranks of each group
    name: str = ""  # of which those of the groups are made
    address: str = ""
    port: int = 0


class _Groups:
    """One group for each stage, the same servers in all; on the ranks that send, whose methods are collective."""

    def __init__(self, senders: Meeting, stage: int, *, backend: str, timeout_s: float) -> None:
        """senders: the sources, whose first is rank 0; stage: of this rank."""
        self.senders, self.stage = senders, stage
        self.names: list[str] = []
        self.own: ServerGroup | None = None
        self._backend, self._timeout_s = backend, timeout_s
        self._rendezvous: Rendezvous | None = None
        self._members: list[tuple[Server, Endpoint]] = []  # on rank 0

    def join(self, requests: ServerRequests) -> bool:
        """Make groups of all servers of `requests` that have not failed, unless these are the groups' members now.

        Returns whether there are any; those with whom no group came about have failed.
        """
        for _ in range(_ATTEMPTS):
            own = asdict(self._plan(requests))
            plan = _Plan(**self.senders.broadcast(own, source=0, what="to make groups with servers"))
            if not plan.fresh:
                return plan.any_server
            if self._make(requests, plan):
                return True
            self.leave(but=requests.failed)
        if self.senders.leads:
            requests.fail_all(f"no process group with it came about in {_ATTEMPTS} attempts")
        return False

    def leave(self, *, but: Container[int] = ()) -> None:
        """End the groups; no collective. The servers leave them too, except those in `but`."""
        with ServerRequests([server for server, _ in self._members if server.index not in but]) as requests:
            requests.start(self._leave)
            requests.wait()  # one that does not answer has left or will not: either way it is in no later group
        self.forget()

    def forget(self) -> None:
        """End this rank's side of the groups."""
        if self.own is not None:
            self.own.close()
        if self._rendezvous is not None:
            self._rendezvous.close()
        self.own, self._rendezvous, self._members, self.names = None, None, [], []

    def release(self, server: Server, receiver: Receiver, error: ServerError | None) -> None:
        """Let a server leave the groups, so that its peers wait for it no longer; one that does not answer is skipped.

        See `transport.GroupRelease`.
        """
        if error is None or error.status is not None:
            self._leave(server, receiver)

    def _leave(self, _: Server, receiver: Receiver) -> None:
        for name in self.names:
            try:
                receiver.destroy_group(name)
            except ServerError as error:  # with an answer: it is in no such group
                if error.status is None:
                    raise

    def _plan(self, requests: ServerRequests) -> _Plan:
        """Return the plan on rank 0; elsewhere nothing of use."""
        members = [(server, _receiver(server).endpoint) for server in requests.servers]
        if not members or (self.names and members == self._members):
            return _Plan(any_server=bool(members))
        self.leave()
        urls = [endpoint.url for _, endpoint in members]
        try:
            self._rendezvous = Rendezvous(urls, timeout_s=self._timeout_s)
        except (OSError, RuntimeError) as error:
            requests.fail_all(f"no port to meet it at: {error}")
            return _Plan(any_server=False)
        self._members = members
        return _Plan(
            any_server=True,
            fresh=True,
            urls=urls,
            size=1 + sum(server.tp for server, _ in members),
            name=f"mega_rl-weights-{os.getpid()}-{next(_numbers)}",
            address=self._rendezvous.address,
            port=self._rendezvous.port,
        )

    def _make(self, requests: ServerRequests, plan: _Plan) -> bool:
        """Make the group of every stage; return whether all came about."""
        if not self.senders.leads:
            self.forget()
        for stage in range(self.senders.size):
            self.names.append(f"{plan.name}-{stage}")
            joined: Future[None] | None = None
            if stage == self.stage:
                self.own = ServerGroup(self.names[-1], backend=self._backend, size=plan.size, timeout_s=self._timeout_s)
                joined = self.own.join(plan.address, plan.port, towards=plan.urls)
            if self.senders.leads:
                assert self._rendezvous is not None
                self._rendezvous.expect(plan.size)
                requests.start(_Invitation(self._members, plan, self.names[-1], self._backend))
            if not self.settled(requests, joined, release=partial(self._end_rendezvous, requests)):
                return False
        return True

    def settled(
        self, requests: ServerRequests, own: Future[None] | None, *, release: GroupRelease | None = None
    ) -> bool:
        """Return whether all servers have answered with success, and this rank's part in it, `own`, has ended too."""
        good = requests.wait_together(release or self.release) if self.senders.leads else True
        good = self.senders.broadcast(good, source=0, what="while servers took a bucket")
        # A part that failed leaves the servers with the group of a peer that is gone.
        failed = good and own is not None and not _ends(own)
        return good and not self.senders.max(float(failed), what="while servers took a bucket")

    def _end_rendezvous(self, requests: ServerRequests, _: Server, __: Receiver, ___: ServerError | None) -> None:
        """Let servers wait no longer for those that have failed. See `transport.GroupRelease`."""
        assert self._rendezvous is not None
        self._rendezvous.close(absent=sum(server.tp for server, _ in self._members if server.index in requests.failed))


class _Update:
    """One update, on the ranks that send."""

    def __init__(
        self,
        requests: ServerRequests,
        groups: _Groups,
        staged: Iterator[tuple[Bucket, Tensor]],
        version: int,
        dtype: torch.dtype,
    ) -> None:
        """staged: this stage's buckets; the bytes of one stay until the one after the next is asked for."""
        self._requests, self._groups, self._staged = requests, groups, staged
        self._version, self._dtype = version, dtype
        self._breaks = 0

    def send_all(self, buckets: Sequence[Bucket]) -> None:
        """Send the buckets of all stages, in this order; take all of this stage's, even if no server is left."""
        joined = self._groups.join(self._requests)
        next_own = next(self._staged, None)
        for bucket in buckets:
            data = None
            if next_own is not None and next_own[0] is bucket:
                data = next_own[1]
            announcement = _Announcement(bucket, self._dtype, self._version if bucket is buckets[-1] else None)
            while joined:
                own = self._start(bucket, announcement, data)
                if next_own is not None and next_own[0] is bucket:
                    next_own = next(self._staged, None)  # while servers take this one
                if self._groups.settled(self._requests, own):
                    break
                joined = self._rejoin()
            if next_own is not None and next_own[0] is bucket:
                next_own = next(self._staged, None)

    def _start(self, bucket: Bucket, announcement: _Announcement, data: Tensor | None) -> Future[None] | None:
        """Start the broadcast of a bucket on its source and, on rank 0, announce it to all servers."""
        groups = self._groups
        own = None
        if data is not None:
            assert groups.own is not None
            own = groups.own.broadcast(data)
        if groups.senders.leads:
            name = groups.names[bucket.pp_rank]
            self._requests.start(lambda server, receiver: announcement(receiver, name))
        return own

    def _rejoin(self) -> bool:
        """Make new groups of the servers that have not failed, after one has."""
        self._breaks += 1
        if self._breaks == _ATTEMPTS and self._groups.senders.leads:
            self._requests.fail_all(f"its process groups broke {_ATTEMPTS} times in one update")
        self._groups.forget()  # servers have left: `_Groups.release`
        return self._groups.join(self._requests)


class _Invitation:
    """Request to join a stage's group."""

    def __init__(self, members: Sequence[tuple[Server, Endpoint]], plan: _Plan, name: str, backend: str) -> None:
        self._plan, self._name, self._backend = plan, name, backend
        ends = itertools.accumulate((server.tp for server, _ in members), initial=1)
        self._offset = {server.index: end for (server, _), end in zip(members, ends, strict=False)}

    def __call__(self, server: Server, receiver: Receiver) -> None:
        receiver.init_group(
            address=self._plan.address,
            port=self._plan.port,
            rank_offset=self._offset[server.index],
            world_size=self._plan.size,
            group=self._name,
            backend=self._backend,
        )


class _Announcement:
    """Request that announces one bucket."""

    def __init__(self, bucket: Bucket, dtype: torch.dtype, version: int | None) -> None:
        self._version = version
        usual = str(dtype).removeprefix("torch.")
        self._names = [slot.name for slot in bucket.slots]
        self._dtypes = ["float32" if slot.float32 else usual for slot in bucket.slots]
        self._shapes = [slot.shape for slot in bucket.slots]

    def __call__(self, receiver: Receiver, group: str) -> None:
        receiver.update_from_distributed(
            names=self._names,
            dtypes=self._dtypes,
            shapes=self._shapes,
            group=group,
            load_format=FORMAT,
            version=self._version,
        )


def _receiver(server: Server) -> Receiver:
    assert server.receiver is not None, f"rank {dist.get_rank()} does not lead server {server.index}"
    return server.receiver


def _ends(future: Future[None]) -> bool:
    """Return whether this rank's part of what servers have answered ends well, and soon."""
    try:
        future.result(SETTLE_S)
    except (OSError, RuntimeError):  # TimeoutError among them
        return False
    return True
