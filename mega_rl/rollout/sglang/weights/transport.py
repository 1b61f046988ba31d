"""Transport of weights from the trainer to servers: the protocol, and the parts that all transports share."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mega_rl.converters.live.export import export_hf
from mega_rl.converters.live.load import weights_of
from mega_rl.errors import RunError
from mega_rl.parallel.comm import GroupRanks
from mega_rl.protocols import Ranks
from mega_rl.rollout.sglang.http.control import Control, ServerError
from mega_rl.rollout.sglang.weights.reshard import Bucket, plan_buckets

if TYPE_CHECKING:
    from mega_rl.engines.base import ModelEngine

GRACE_S = 60.0  # beyond a server's deadline, for the work of ranks between two collectives
# In the answer of a server whose peers in a process group are gone; the words are torch's and SGLang's.
_GROUP = re.compile(r"gloo|nccl|process group|connection (closed|reset|was)|broken pipe|timed out", re.IGNORECASE)


@dataclass(frozen=True)
class TrainerWeights:
    """Weights of an engine with a language model's head, in the dtype in which they travel."""

    engine: ModelEngine
    dtype: torch.dtype  # the servers'; tensors that are float32 in every model stay so

    @property
    def sharded(self) -> bool:
        """Return whether data parallelism has cut the parameters, so that reading one is collective over them."""
        return self.engine.is_sharded

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return self.engine.device

    @property
    def experts(self) -> bool:
        """Return whether the model has experts."""
        return self.engine.sharding.hf.moe is not None

    def buckets(self, bucket_bytes: int, *, by_stage: bool = False) -> tuple[Bucket, ...]:
        """Return the plan: see `reshard.plan_buckets`."""
        sharding, itemsize = self.engine.sharding, self.dtype.itemsize
        return plan_buckets(sharding, bucket_bytes=bucket_bytes, itemsize=itemsize, by_stage=by_stage)

    def chunks(self) -> list[nn.Module]:
        """Return the model's chunks with whole parameters, up to date; collective."""
        return self.engine.whole_chunks()

    def live(self) -> list[Mapping[str, Tensor]]:
        """Return this rank's weights by name for each chunk; collective, as is reading one where they are sharded."""
        return [weights_of(chunk) for chunk in self.chunks()]

    def export(self, *, bucket_bytes: int, own_stage: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, full tensor) on all ranks of a replica, which gather together; see `export_hf`."""
        place = replace(self.engine.place, bucket_bytes=bucket_bytes)
        return export_hf(self.chunks(), place, dtype=self.dtype, own_stage=own_stage)


@dataclass(frozen=True)
class Server:
    """A server as a transport sees it; equal on all ranks but for `receiver`."""

    index: int  # number of the server in the run
    tp: int  # its tensor-parallel ranks, equally many on each of its hosts
    host: str | None  # `choose.host_identity` of the host with its URL; None: not known
    receiver: Control | None = None  # needed on the rank that leads it: the first of its host, or rank 0
    further_hosts: tuple[str, ...] = ()  # hosts of its other nodes, in their order

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

    bytes: int = 0  # weights, counted once however many servers got them
    buckets: int = 0
    tensors: int = 0
    requests: int = 0  # HTTP requests to all servers together
    seconds: float = 0.0  # the slowest rank's
    failed: dict[int, str] = field(default_factory=dict)  # server -> why; all others have all weights

    @classmethod
    def of(cls, buckets: Sequence[Bucket]) -> SendReport:
        """Return the report of an update in these buckets, before any request."""
        tensors = sum(len(bucket.slots) for bucket in buckets)
        return cls(sum(bucket.nbytes for bucket in buckets), len(buckets), tensors)


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


class RanksLost(RunError):
    """Other ranks of the trainer ended or missed a deadline."""


def open_ranks(parts: Sequence[Sequence[int]] = (), *, timeout_s: float) -> GroupRanks:
    """Return the ranks of this rank's part of the run, over gloo; without parts of the whole run; collective.

    parts: ranks of each. Every rank is in one of them: torch may ask ranks that a group leaves out to take part in its
    birth, and waits for ever where some rank is left out more often than others.
    """
    timeout = timedelta(seconds=timeout_s)
    if len(parts) > 1:
        group, _ = dist.new_subgroups_by_enumeration(list(map(list, parts)), backend="gloo", timeout=timeout)
    else:
        group = dist.new_group(backend="gloo", timeout=timeout)
    return GroupRanks(group)


def open_host_ranks(hosts: Sequence[str], *, timeout_s: float) -> tuple[GroupRanks, GroupRanks]:
    """Return (all ranks of the run, those on this rank's host); collective.

    hosts: of each rank of the run; or sites, whose ranks then count as those of one host.
    """
    world = open_ranks(timeout_s=timeout_s)
    parts = [[rank for rank, host in enumerate(hosts) if host == name] for name in sorted(set(hosts))]
    return world, open_ranks(parts, timeout_s=timeout_s) if len(parts) > 1 else world


def close_ranks(*opened: GroupRanks | None) -> None:
    """Destroy the process groups."""
    for group in {id(ranks): ranks.group for ranks in opened if ranks is not None}.values():
        dist.destroy_process_group(group)


# Frees servers that wait for others; see `ServerRequests.wait_together`.
GroupRelease = Callable[[Server, BaseException | None], None]


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

    def start(self, work: Callable[[Server, Control], None]) -> None:
        """Call work(server, its receiver), one request, for each server that has not failed, each in its own thread."""
        assert not self._waiting, "requests are pending"
        for server in self.servers:
            assert server.receiver is not None, f"this rank does not lead server {server.index}"
            self.sent += 1
            self._waiting.append((server, self._pool.submit(work, server, server.receiver)))

    def fail_all(self, why: str) -> None:
        """Mark all servers that have not failed as failed."""
        self.failed |= {server.index: why for server in self.servers}

    def wait(self) -> None:
        """Wait for the answers to all started requests; record those that failed."""
        for server, future in self._waiting:
            if (error := future.exception()) is not None:
                self._record(server, error)
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
            for server, error in ended:
                if error is not None and self._is_own(server, error, broken=broken):
                    self._record(server, error)
            broken = broken or any(error is not None for _, error in ended)
            over += ended
            if broken:
                releases += [self._pool.submit(release, server, error) for server, error in over]
                over = []
        wait(releases, timeout=GRACE_S / 2)  # a server that takes longer to leave is in no later group
        return not broken

    def _record(self, server: Server, error: BaseException) -> None:
        self.failed[server.index] = str(error) if isinstance(error, ServerError) else f"{type(error).__name__}: {error}"
        if not isinstance(error, ServerError):
            self._bug = error  # raised in `agree`: the other ranks are inside the same collectives now

    def _is_own(self, server: Server, error: BaseException, *, broken: bool) -> bool:
        """Return whether a failure is the server's own; `broken`: some server has failed before this one."""
        if not isinstance(error, ServerError) or error.status is None:
            return True
        first = server.index not in self._blamed
        if not broken:
            self._blamed.add(server.index)
        return not (broken or (first and _GROUP.search(str(error)) is not None))

    def agree(self, report: SendReport, world: Ranks, *, started: float) -> SendReport:
        """Return the report with the outcome of all ranks' requests, equal on all; re-raise our own errors.

        started: time.perf_counter() at the beginning.
        """
        own = [self.sent, {str(index): why for index, why in self.failed.items()}, time.perf_counter() - started]
        for sent, failed, seconds in world.gather_json(own):
            report.requests += sent
            report.failed |= {int(index): why for index, why in failed.items()}
            report.seconds = max(report.seconds, seconds)
        if self._bug is not None:
            raise self._bug
        return report


def chosen(servers: Sequence[Server], indices: Sequence[int] | None) -> list[Server]:
    """Return the servers with these indices; all for None."""
    known = {server.index: server for server in servers}
    assert indices is None or set(indices) <= set(known), f"servers {indices} of {sorted(known)}"
    return [server for server in servers if indices is None or server.index in indices]
