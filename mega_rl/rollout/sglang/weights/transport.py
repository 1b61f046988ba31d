"""Transport of weights from the trainer to servers: one update's course, which all transports share."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from mega_rl.converters.live.adapters import merged
from mega_rl.converters.live.export import export_hf
from mega_rl.converters.safetensors.header import PLAIN_NAMES, renamed
from mega_rl.parallel.agreement import merge_failures
from mega_rl.parallel.comm import GroupRanks
from mega_rl.protocols import Ranks
from mega_rl.rollout.sglang.control import Control, ServerError
from mega_rl.rollout.sglang.weights.reshard import Bucket, Slot, plan_buckets
from mega_rl.types import Metrics

if TYPE_CHECKING:
    from mega_rl.engines.base import ModelEngine

FORMAT = "flattened_bucket"  # SGLang's load format: one tensor of bytes, and the place of each tensor in it
GRACE_S = 60.0  # beyond a server's deadline, for the work of ranks between two collectives
# In the answer of a server whose peers in a process group are gone; the words are torch's and SGLang's.
_GROUP = re.compile(r"gloo|nccl|process group|connection (closed|reset|was)|broken pipe|timed out", re.IGNORECASE)


@dataclass(frozen=True)
class TrainerWeights:
    """Weights of an engine with a language model's head, in the dtype in which they travel."""

    engine: ModelEngine
    dtype: torch.dtype  # the servers'; tensors that are float32 in every model stay so
    apart: bool = False  # the base comes without its adapters

    def buckets(self, bucket_bytes: int, *, by_stage: bool = False) -> tuple[Bucket, ...]:
        """Return the plan: see `reshard.plan_buckets`."""
        sharding, itemsize = self.engine.sharding.merged, self.dtype.itemsize
        plan = plan_buckets(sharding, bucket_bytes=bucket_bytes, itemsize=itemsize, by_stage=by_stage)
        named = (tuple(slot._replace(name=self._on_disk(slot.name)) for slot in bucket.slots) for bucket in plan)
        return tuple(replace(bucket, slots=slots) for bucket, slots in zip(plan, named, strict=True))

    def export(self, *, bucket_bytes: int, own_stage: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield (name in the checkpoint, full tensor) on all ranks of a replica; see `export_hf`."""
        place = replace(self.engine.place, bucket_bytes=bucket_bytes)
        tensors = export_hf(self.engine.whole_chunks(), place, dtype=self.dtype, own_stage=own_stage)
        adapter = None if self.apart else self.engine.sharding.hf.adapter
        return ((self._on_disk(name), tensor) for name, tensor in merged(tensors, adapter))

    def adapters(self) -> dict[str, Tensor]:
        """Return the adapters on the host, by their names in the checkpoint; collective.

        Ranks that do not gather the first copy of the weights get none.
        """
        place = self.engine.place
        if not place.gathers_first_copy:
            return {}
        tensors = export_hf(self.engine.whole_chunks(), place, dtype=self.dtype, only_adapters=True)
        return {self._on_disk(name): tensor.cpu() for name, tensor in tensors}

    def _on_disk(self, name: str) -> str:
        return renamed(name, PLAIN_NAMES, self.engine.sharding.hf.prefixes)


@dataclass(frozen=True)
class Server:
    """A server as a transport sees it."""

    index: int  # number of the server in the run
    tp: int  # its tensor-parallel ranks, equally many on each of its hosts
    hosts: tuple[int, ...]  # numbers of its nodes' hosts, in their order; empty: not known
    receiver: Control  # only the rank that leads it uses it


class Transport(ABC):
    """Sends the trainer's weights to servers. Methods are collective over the run's ranks.

    Over process groups rank 0 talks to all servers; where devices are shared, the first rank of a server's first host.
    """

    _by_stage: ClassVar[bool] = False  # no bucket has weights of two pipeline stages
    _world: GroupRanks  # all ranks of the run; set by `_open`
    _part: GroupRanks  # ranks that send together with this one

    def __init__(
        self, weights: TrainerWeights, servers: Collection[Server], *, bucket_bytes: int, timeout_s: float
    ) -> None:
        """
        servers: of this moment, read at each send.
        timeout_s: longest that a server takes to answer, in seconds.
        """
        self._weights, self._servers = weights, servers
        self._bucket_bytes, self._timeout_s = bucket_bytes, timeout_s
        self.buckets = weights.buckets(bucket_bytes, by_stage=self._by_stage)  # in the order in which they are sent
        self.report: Metrics = {"sync/bytes": float(sum(bucket.nbytes for bucket in self.buckets))}  # of the last send
        self._is_open = False

    def leader_of(self, server: Server) -> int:
        """Return the rank that talks to a server."""
        return 0

    def send(self, *, version: int, servers: Sequence[int] | None = None) -> dict[int, str]:
        """Send every weight to these servers (None: all); return the failed ones' reasons.

        Arguments and result are equal on all ranks. The servers must be paused; their cache is not flushed. The weight
        version goes with the last bucket. A server that fails hinders no other.
        """
        if not self._is_open:
            self._open()
            self._is_open = True
        to = [server for server in self._servers if servers is None or server.index in servers]
        led = [server for server in to if self.leader_of(server) == self._world.rank]
        with ServerRequests(led) as requests:
            self._send_buckets(requests, to, version)
            return requests.agree(self._world)

    @abstractmethod
    def _send_buckets(self, requests: ServerRequests, servers: Sequence[Server], version: int) -> None:
        """Send all buckets to `servers`; `requests` has those that this rank leads."""

    @abstractmethod
    def _open(self) -> None:
        """Make the groups, and whatever else later sends reuse."""

    def close(self) -> None:
        """Release memory and groups. A later `send` sets all up again."""
        if self._is_open:
            for group in {self._part.group, self._world.group}:
                dist.destroy_process_group(group)
        self._is_open = False


def slot_tensor(flat: Tensor, slot: Slot, dtype: torch.dtype) -> Tensor:
    """Return the tensor of a slot as a view of the bucket's bytes `flat` [nbytes] uint8."""
    return flat[slot.start : slot.end].view(torch.float32 if slot.float32 else dtype).view(slot.shape)


def filled(
    tensors: Iterable[tuple[str, Tensor]],
    buckets: Sequence[Bucket],
    memory: Callable[[int, int], Tensor],
    dtype: torch.dtype,
) -> Iterator[tuple[Bucket, Tensor]]:
    """Yield (bucket, its bytes) for each bucket, as soon as its tensors have come.

    tensors: (Hugging Face name, full tensor), bucket after bucket, in any order within one. memory(number of the
    bucket, nbytes): where it goes, [nbytes] uint8, called before its first tensor is taken.
    """
    stream = iter(tensors)
    for number, bucket in enumerate(buckets):
        data = memory(number, bucket.nbytes)
        missing = {slot.name: slot for slot in bucket.slots}
        while missing:
            name, tensor = next(stream)
            slot_tensor(data, missing.pop(name), dtype).copy_(tensor)
        yield bucket, data
    left = next(stream, None)
    assert left is None, f"{left[0]} belongs to no bucket" if left else ""


def open_ranks(parts: Sequence[Sequence[int]] = (), *, timeout_s: float) -> GroupRanks:
    """Return the ranks of this rank's part (default: the run), over gloo; collective.

    Every rank is in one part: torch may ask ranks that a group leaves out to take part in its birth, and waits for ever
    where some rank is left out more often than others.
    """
    timeout = timedelta(seconds=timeout_s)
    if len(parts) > 1:
        group, _ = dist.new_subgroups_by_enumeration(list(map(list, parts)), backend="gloo", timeout=timeout)
    else:
        group = dist.new_group(backend="gloo", timeout=timeout)
    return GroupRanks(group)


# Frees servers that wait for others; see `ServerRequests.wait_together`.
GroupRelease = Callable[[Server, BaseException | None], None]


class ServerRequests:
    """Concurrent requests, one at a time to each server; a failed one gets none."""

    def __init__(self, servers: Sequence[Server]) -> None:
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
        """Call work(server, its receiver) for each server left, each in a thread."""
        assert not self._waiting, "requests are pending"
        self._waiting = [(one, self._pool.submit(work, one, one.receiver)) for one in self.servers]

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
        """Wait for requests in which servers wait for each other; return whether all succeeded.

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

    def agree(self, world: Ranks) -> dict[int, str]:
        """Return the failures of all ranks' requests, equal on all; re-raise our own errors; collective."""
        failed = merge_failures(self.failed, world)
        if self._bug is not None:
            raise self._bug
        return failed
