"""Transport of weights from the trainer to servers: the protocol, and what all transports share."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from mega_rl.errors import RunError
from mega_rl.parallel.agreement import broadcast_json
from mega_rl.parallel.comm import GroupRanks
from mega_rl.rollout.sglang.http.keys import Endpoint
from mega_rl.rollout.sglang.http.request import ServerError

GRACE_S = 60.0  # beyond a server's deadline, for what ranks do between two meetings
# In the answer of a server whose peers in a process group are gone; the words are torch's and SGLang's.
_GROUP = re.compile(r"gloo|nccl|process group|connection (closed|reset|was)|broken pipe|timed out", re.IGNORECASE)


class Receiver(Protocol):
    """The endpoints of one server that carry weights: `control.WeightControl`.

    A call returns when the server has done what it asks; every call has a deadline, and raises ServerError for
    anything but success. Calls come from several threads.
    """

    @property
    def endpoint(self) -> Endpoint:
        """Return the server's address and keys; they change with a restart."""
        ...

    def update_from_tensor(
        self, payloads: Sequence[str], *, load_format: str | None = None, version: int | None = None
    ) -> None: ...

    def init_group(
        self, *, address: str, port: int, rank_offset: int, world_size: int, group: str, backend: str
    ) -> None: ...

    def update_from_distributed(
        self,
        *,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group: str,
        load_format: str | None = None,
        version: int | None = None,
    ) -> None: ...

    def destroy_group(self, group: str) -> None: ...


@dataclass(frozen=True)
class Server:
    """A server as a transport sees it; equal on all ranks but for `receiver`."""

    index: int  # number of the server in the run
    tp: int  # its tensor-parallel ranks, equally many on each of its hosts
    host: str | None  # where its URL is, as `choose.host_identity` says there; None: not known, as behind a URL
    receiver: Receiver | None = None  # needed on the rank that leads it: the first of its host, or rank 0
    further_hosts: tuple[str, ...] = ()  # of its other nodes, in their order

    @property
    def hosts(self) -> tuple[str, ...]:
        """Return the hosts of its nodes, in the order of their ranks; none where they are not known."""
        return () if self.host is None else (self.host, *self.further_hosts)


def sites_of(hosts: Sequence[str], servers: Sequence[Server]) -> tuple[str, ...]:
    """Return for each rank the site of its host: one for all hosts that a server spans, named by the first of them."""
    site = {host: server.host for server in servers for host in server.hosts if server.host is not None}
    return tuple(site.get(host, host) for host in hosts)


@dataclass
class SendReport:
    """Statistics of one `send`; equal on all ranks."""

    bytes: int = 0  # of weights, counted once however many servers got them
    buckets: int = 0
    tensors: int = 0
    requests: int = 0  # HTTP requests to all servers together
    seconds: float = 0.0  # of the slowest rank
    failed: dict[int, str] = field(default_factory=dict)  # server -> why; all others have all weights


class Transport(Protocol):
    """Sends the trainer's weights to servers; made by `choose.choose_transport`, collective over the run's ranks."""

    @property
    def name(self) -> str:
        """Return shared_memory, cuda_ipc or distributed."""
        ...

    def send(self, *, version: int, servers: Sequence[int] | None = None) -> SendReport:
        """Send every weight to these servers (None: all); collective, with equal arguments on all ranks.

        The servers must be paused; their cache is not flushed. The weight version goes with the last bucket. A server
        that fails is reported, not raised, and hinders no other.
        """
        ...

    def close(self) -> None:
        """Release memory and groups; collective. A later `send` sets all up again."""
        ...


class Meeting:
    """Collectives with a deadline between ranks of the trainer: over gloo, whatever the trainer's backend."""

    def __init__(self, group: dist.ProcessGroup, *, timeout_s: float) -> None:
        self._group, self._timeout_s = group, timeout_s
        self._ranks = GroupRanks(group)

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return self._ranks.size

    @property
    def rank(self) -> int:
        """Return this rank's number in the group."""
        return self._ranks.rank

    @property
    def leads(self) -> bool:
        """Return whether this rank is the group's first."""
        return self.rank == 0

    def barrier(self, what: str) -> None:
        """Wait for all ranks of the group."""
        with self._named(what):
            dist.barrier(group=self._group)

    def broadcast(self, value: Any, *, source: int, what: str) -> Any:
        """Return rank `source`'s value on all ranks, as JSON carries it."""
        with self._named(what):
            return broadcast_json(value, self._ranks, source=source)

    def gather(self, value: Any, *, what: str) -> list[Any]:
        """Return every rank's value on all ranks, as JSON carries it."""
        with self._named(what):
            return self._ranks.gather_json(value)

    def max(self, value: float, *, what: str) -> float:
        """Return the largest value of all ranks."""
        with self._named(what):
            return float(self._ranks.max(torch.tensor(value, dtype=torch.float64)))

    def close(self) -> None:
        """Destroy the process group."""
        dist.destroy_process_group(self._group)

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            ranks = ", ".join(map(str, dist.get_process_group_ranks(self._group)))
            raise RanksLost(
                f"weight update: the ranks {ranks} did not meet {what} (deadline {self._timeout_s:g} s): {error}"
            ) from error


class RanksLost(RunError):
    """Other ranks of the trainer ended or missed a deadline."""


def open_meeting(parts: Sequence[Sequence[int]] = (), *, timeout_s: float) -> Meeting:
    """Return a meeting of this rank's part of the run, without parts of all ranks; collective over all ranks.

    parts: ranks of each. Every rank is in one of them: torch may ask ranks that a group leaves out to take part in its
    birth, and waits for ever where some rank is left out more often than others.
    """
    timeout = timedelta(seconds=timeout_s)
    if len(parts) > 1:
        group, _ = dist.new_subgroups_by_enumeration(list(map(list, parts)), backend="gloo", timeout=timeout)
    else:
        group = dist.new_group(backend="gloo", timeout=timeout)
    return Meeting(group, timeout_s=timeout_s)


class HostMeetings:
    """Meetings of all ranks of the run (`world`) and of those on this rank's host (`host`); made collectively."""

    def __init__(self, hosts: Sequence[str], *, timeout_s: float) -> None:
        """hosts: of each rank of the run; or sites, whose ranks then meet as those of one host."""
        self.world = open_meeting(timeout_s=timeout_s)
        parts = [[rank for rank, host in enumerate(hosts) if host == name] for name in sorted(set(hosts))]
        self.host = open_meeting(parts, timeout_s=timeout_s) if len(parts) > 1 else self.world

    def close(self) -> None:
        """Destroy the process groups."""
        if self.host is not self.world:
            self.host.close()
        self.world.close()


class GroupRelease(Protocol):
    """Frees servers that wait for others; see `ServerRequests.wait_together`."""

    def __call__(self, server: Server, receiver: Receiver, error: ServerError | None) -> None: ...


class ServerRequests:
    """Concurrent requests to servers, one at a time to each; a server that failed gets no more."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self.sent = 0
        self.failed: dict[int, str] = {}
        self._bug: BaseException | None = None
        self._blamed: set[int] = set()  # servers that were the first to say that a group is broken
        self._waiting: list[tuple[Server, Future[None]]] = []
        self._servers = list(servers)
        threads = max(1, len(self._servers))
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="weight-update")

    def __enter__(self) -> ServerRequests:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def servers(self) -> list[Server]:
        """Return the servers that have not failed."""
        return [server for server in self._servers if server.index not in self.failed]

    def start(self, work: Callable[[Server, Receiver], None], *, only: Sequence[Server] | None = None) -> None:
        """Call work(server, its receiver), one request, for each server that has not failed, each in its own thread.

        `only`: these servers (None: all).
        """
        assert not self._waiting, "requests are pending"
        for server in self.servers if only is None else only:
            assert server.receiver is not None, f"this rank does not lead server {server.index}"
            self.sent += 1
            self._waiting.append((server, self._pool.submit(work, server, server.receiver)))

    def fail_all(self, why: str) -> None:
        """Mark all servers that have not failed as failed."""
        self.failed |= {server.index: why for server in self.servers}

    def wait(self) -> None:
        """Wait for the answers to all started requests; record those that failed."""
        for server, future in self._waiting:
            error = future.exception()
            if isinstance(error, ServerError):
                self.failed[server.index] = str(error)
            elif error is not None:
                # Raised in `agree`: the other ranks are inside the same collectives now.
                self.failed[server.index] = f"{type(error).__name__}: {error}"
                self._bug = error
        self._waiting = []

    def wait_together(self, release: GroupRelease) -> bool:
        """Wait for the answers to requests in which servers wait for each other; return whether all succeeded.

        After the first failure `release` is called for every server that has answered or failed, in the threads of the
        requests, so that those that wait for it end as well. A server that failed only because of another is not
        recorded as failed: it answered after that, or that the group is broken; being the first to say so counts once.
        """
        waiting = {future: server for server, future in self._waiting}
        self._waiting = []
        broken, over, releases = False, [], []
        while waiting:
            done, _ = wait(waiting, return_when=FIRST_COMPLETED)
            ended = [(waiting.pop(future), future.exception()) for future in done]
            self._record_first([(server, error) for server, error in ended if error is not None], broken=broken)
            broken = broken or any(error is not None for _, error in ended)
            over += ended
            if broken:
                releases += [self._pool.submit(_release, release, server, error) for server, error in over]
                over = []
        wait(releases, timeout=GRACE_S / 2)  # a server that takes longer to leave is in no later group
        return not broken

    def _record_first(self, failures: Sequence[tuple[Server, BaseException]], *, broken: bool) -> None:
        """Record the failures that are the servers' own; `broken`: some server has failed before these."""
        for server, error in failures:
            if not isinstance(error, ServerError):
                self.failed[server.index] = f"{type(error).__name__}: {error}"
                self._bug = error
            elif error.status is None or not (broken or self._blames_group(server, error)):
                self.failed[server.index] = str(error)

    def _blames_group(self, server: Server, error: ServerError) -> bool:
        first = server.index not in self._blamed
        self._blamed.add(server.index)
        return first and _GROUP.search(str(error)) is not None

    def agree(self, report: SendReport, meeting: Meeting, *, leaders: Sequence[int], started: float) -> SendReport:
        """Return the report with the outcome of every leader's requests, equal on all ranks; re-raise our own errors.

        `leaders`: ranks of `meeting` that had servers. `started`: time.perf_counter() at the beginning.
        """
        for leader in leaders:
            words = meeting.broadcast(
                [self.sent, list(self.failed.items())], source=leader, what="at the end of an update"
            )
            report.requests += words[0]
            report.failed |= {int(index): str(why) for index, why in words[1]}
        report.seconds = meeting.max(time.perf_counter() - started, what="at the end of an update")
        if self._bug is not None:
            raise self._bug
        return report


def _release(release: GroupRelease, server: Server, error: BaseException | None) -> None:
    assert server.receiver is not None
    with suppress(ServerError):  # its failure, if it has one, is known already
        release(server, server.receiver, error if isinstance(error, ServerError) else None)


def chosen(servers: Sequence[Server], indices: Sequence[int] | None) -> list[Server]:
    """Return the servers with these indices; all for None."""
    known = {server.index: server for server in servers}
    assert indices is None or set(indices) <= set(known), f"servers {indices} of {sorted(known)}"
    return [server for server in servers if indices is None or server.index in indices]
