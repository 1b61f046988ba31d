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

# How long a rank waits for the others: each has its share of the files to write before they meet.
DEADLINE = timedelta(hours=4)

T = TypeVar("T")


class World:
    """This process among those of the conversion. What one of them raises, all raise, so that none waits for ever."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    def each(self, work: Callable[[], T]) -> list[T]:
        """Results of `work` of all ranks, in rank order; collective.

        Raises what `work` raised here, or UserError with the message of the first rank on which it failed.
        """
        if self.size == 1:
            return [work()]
        result, failure, error = None, None, None
        try:
            result = work()
        except Exception as caught:  # told to the others, then raised
            failure, error = str(caught) or type(caught).__name__, caught
        outcomes: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(outcomes, (failure, result))
        except RuntimeError as caught:
            raise error or RunError(f"another rank has ended or does not answer ({caught})") from caught
        if error is not None:
            raise error
        failed = [(rank, message) for rank, (message, _) in enumerate(outcomes) if message is not None]
        if failed:
            raise UserError(f"rank {failed[0][0]} failed: {failed[0][1]}")
        return [value for _, value in outcomes]

    def agree(self, work: Callable[[], T]) -> T:
        """This rank's result of `work`, which need not be sent; collective. Raises as `each` does."""
        results: list[T] = []
        self.each(lambda: results.append(work()))
        return results[0]

    def first(self, work: Callable[[], T]) -> T:
        """The result of `work` on rank 0, which alone does it; collective."""
        results: list[Any] = self.each(lambda: work() if self.rank == 0 else None)
        value: T = results[0]
        return value

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
    store: Store = next(rendezvous("env://", timeout=DEADLINE))[0]
    return store


@contextmanager
def joined_world() -> Iterator[World]:
    """The world that the environment describes (RANK, WORLD_SIZE); its process group is taken down at the end.

    A group that exists already is used and left alone. Raises UserError when the variables are no numbers.
    """
    if dist.is_initialized():
        yield World(dist.get_rank(), dist.get_world_size())
        return
    rank, size = _number("RANK", 0), _number("WORLD_SIZE", 1)
    if size == 1:
        yield World()
        return
    # A fresh key space each time: gloo would find the addresses of a destroyed world under the old keys.
    store = PrefixStore(f"mega_rl/conversion/{next(_generation)}", _store())
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=DEADLINE)
    try:
        yield World(rank, size)
    finally:
        dist.destroy_process_group()


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise UserError(f"environment variable {name}={text}: must be a number, as torchrun sets it")
    return int(text)
