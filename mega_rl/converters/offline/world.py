"""The processes that share a conversion: this one only, or those that torchrun has started."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from mega_rl.parallel.agreement import run_on_all, run_on_one
from mega_rl.parallel.comm import GroupRanks, SingleRank, ranks_of

# Ranks meet every few seconds while they work, so a rank that does not answer for this long is lost.
DEADLINE = timedelta(minutes=5)

Result = TypeVar("Result")
World = SingleRank | GroupRanks


@contextmanager
def joined_world() -> Iterator[World]:
    """Yield the ranks that RANK and WORLD_SIZE describe; an existing process group is used and kept."""
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    joins = not dist.is_initialized() and size > 1
    if joins:
        # New keys each time: under the old ones gloo would find the addresses of a group that was destroyed.
        store = PrefixStore(f"mega_rl/conversion/{next(_generation)}", _store())
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=DEADLINE)
    try:
        yield ranks_of(dist.group.WORLD) if dist.group.WORLD is not None else SingleRank()
    finally:
        if joins:
            dist.destroy_process_group()


def on_all(work: Callable[[], Result], world: World) -> Result:
    """Call `work` on every rank and return this rank's result; if one rank fails, all raise. Collective."""
    return run_on_all(work, world) if world.size > 1 else work()


def on_first(work: Callable[[], Result], world: World) -> Result:
    """Call `work` on rank 0 and return its result (JSON) on every rank; if it fails, all raise. Collective."""
    result: Result = run_on_one(work, world) if world.size > 1 else work()
    return result


_generation = itertools.count()


@cache
def _store() -> Store:
    """Return torchrun's store, kept as long as the process: a second one would race with the end of the first."""
    store: Store = next(rendezvous("env://", timeout=DEADLINE))[0]
    return store
