"""The processes of a conversion: one, or those that torchrun has started."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from mega_rl.errors import RunError, UserError
from mega_rl.parallel.agreement import all_failures, broadcast_json
from mega_rl.parallel.comm import GroupRanks, SingleRank, ranks_of

# How long a rank waits for the others: each has its share of the files to write before they meet.
DEADLINE = timedelta(hours=4)
MEETING_DEADLINE = timedelta(minutes=5)  # to reach the launcher's store

T = TypeVar("T")


class World:
    """This process among those of the conversion. What one of them raises, all raise, so that none waits for ever."""

    def __init__(self, ranks: SingleRank | GroupRanks | None = None) -> None:
        self._ranks = ranks or SingleRank()
        self.rank, self.size = self._ranks.rank, self._ranks.size

    def each(self, work: Callable[[], T], *, encode: Callable[[T], Any], decode: Callable[[Any], T]) -> list[T]:
        """Return the results of `work` of all ranks, in rank order; collective.

        `encode` makes JSON of a result, `decode` a result of JSON.

        Raises:
            Exception: what `work` raised here, else UserError with the message of the lowest rank on which it failed.
            RunError: another rank has ended or does not answer.
        """
        value = self.agree(work)
        if self.size == 1:
            return [value]
        with self._answered():
            return [decode(raw) for raw in self._ranks.gather_json(encode(value))]

    def agree(self, work: Callable[[], T]) -> T:
        """Return this rank's result of `work`; collective. Raises as `each`."""
        failure: Exception | None = None
        try:
            value = work()
        except Exception as error:  # noqa: BLE001 - the other ranks learn it first
            failure = error
        message = None if failure is None else str(failure) or type(failure).__name__
        with self._answered(failure):
            heard, _ = all_failures(message, self._ranks, most=1)
        if failure is not None:
            raise failure
        for rank, message in heard.items():
            raise UserError(f"rank {rank} failed: {message}")
        return value

    def first(self, work: Callable[[], T]) -> T:
        """Return the result (JSON) of `work` on rank 0, which alone does it; collective. Raises as `each`."""
        value = self.agree(lambda: work() if self.rank == 0 else None)
        if self.size == 1:
            return value  # type: ignore[return-value]
        with self._answered():
            result: T = broadcast_json(value, self._ranks)
        return result

    @contextmanager
    def _answered(self, failure: Exception | None = None) -> Iterator[None]:
        """Turn the loss of another rank into `failure`, or an error that says so."""
        try:
            yield
        except RuntimeError as error:
            raise failure or RunError(f"another rank has ended or does not answer ({error})") from error

    def share(self, items: Sequence[T], sizes: Sequence[int]) -> list[T]:
        """This rank's part of the items: the largest first, each to the rank that has least so far."""
        loads = [0] * self.size
        mine = set()
        for i in sorted(range(len(items)), key=lambda i: (-sizes[i], i)):
            rank = loads.index(min(loads))
            loads[rank] += sizes[i]
            if rank == self.rank:
                mine.add(i)
        return [item for i, item in enumerate(items) if i in mine]


_generation = itertools.count()


@cache
def _store() -> Store:
    """torchrun's store, kept for the life of the process: a second one on its port would race with the first's end."""
    store: Store = next(rendezvous("env://", timeout=MEETING_DEADLINE))[0]
    store.set_timeout(DEADLINE)
    return store


@contextmanager
def joined_world() -> Iterator[World]:
    """The world that the environment describes (RANK, WORLD_SIZE); its process group is taken down at the end.

    A group that exists already is used and left alone. Raises UserError when the variables are not numbers.
    """
    if dist.is_initialized():
        yield World(ranks_of(_world_group()))
        return
    rank, size = _number("RANK", 0), _number("WORLD_SIZE", 1)
    if size == 1:
        yield World()
        return
    # A fresh key space each time: gloo would find the addresses of a destroyed world under the old keys.
    store = PrefixStore(f"mega_rl/conversion/{next(_generation)}", _store())
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=DEADLINE)
    try:
        yield World(ranks_of(_world_group()))
    finally:
        dist.destroy_process_group()


def _world_group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise UserError(f"environment variable {name}={text}: must be a number, as torchrun sets it")
    return int(text)
