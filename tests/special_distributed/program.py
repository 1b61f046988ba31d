"""What the programs of this folder have in common: their ranks, which torchrun has started, and the test of each."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from mega_rl.parallel.comm import GroupRanks
from tests.helpers.distributed import device_for, run_ranks

gc.enable()  # the imports are done: see __init__.py

FOLDER = Path(__file__).parent
TIMEOUT = timedelta(seconds=60)  # of a collective

_generation = itertools.count()


def device() -> torch.device:
    """This rank's device: a GPU of its own where every rank can have one; else the CPU, and no GPU is visible."""
    if device_for(int(os.environ["WORLD_SIZE"])) == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        return torch.device("cuda", torch.cuda.current_device())
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return torch.device("cpu")


@contextmanager
def world() -> Iterator[GroupRanks]:
    """All ranks, over NCCL or gloo."""
    backend = "nccl" if device().type == "cuda" else "gloo"
    store, rank, size = next(rendezvous("env://", timeout=TIMEOUT))
    # Keys of its own: a world before this one has left its addresses.
    store = PrefixStore(f"special_distributed/{next(_generation)}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    try:
        assert dist.group.WORLD is not None
        yield GroupRanks(dist.group.WORLD)
    finally:
        dist.destroy_process_group()


def finish(ranks: GroupRanks) -> None:
    """Rank 0 says that all have come to the end."""
    assert ranks.gather_json(ranks.rank) == list(range(ranks.size))
    if ranks.rank == 0:
        print(f"ok on {ranks.size} ranks, {dist.get_backend()}")


def group_of_mine(groups: list[list[int]]) -> dist.ProcessGroup:
    """The process group of this rank among groups of ranks that cover the world; collective."""
    group, _ = dist.new_subgroups_by_enumeration(groups, timeout=TIMEOUT)
    assert group is not None
    return group


def run_on_four_ranks(rank: int, main: Callable[[], None]) -> None:
    """Run a program on this rank."""
    main()


def pass_on_four_ranks(main: Callable[[], None]) -> None:
    """Run a program as pytest does: on forked ranks, which need not import everything anew."""
    run_ranks(4, run_on_four_ranks, main, timeout_s=180)


def pass_under_torchrun(program: str) -> None:
    """Run a program as users do, by run_all.sh; AssertionError with its output unless it passes."""
    name = Path(program).stem
    done = subprocess.run(
        ["bash", str(FOLDER / "run_all.sh"), name], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, f"{name} ended with exit code {done.returncode}:\n{done.stdout}\n{done.stderr}"
    assert done.stdout.count("ok on 4 ranks") == 1, done.stdout
    assert f"passed {name}" in done.stdout
