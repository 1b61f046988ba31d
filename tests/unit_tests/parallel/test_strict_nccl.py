"""The stand-in for NCCL finds what NCCL answers with a hang, and engines and transports run on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mega_rl.parallel.layout import ParallelLayout
from tests.helpers import strict_nccl
from tests.helpers.distributed import RanksFailed, run_ranks
from tests.helpers.models import write_tiny_checkpoint
from tests.helpers.selection import FULL
from tests.unit_tests.distributed.engine_cases import run_cases
from tests.unit_tests.distributed.test_weight_resharding import send_all

TIMEOUT_S = 20.0
LAYOUT = ParallelLayout(world_size=2, tp=2, sequence_parallel=True)


def right(rank: int) -> None:
    """Calls of every kind, the same on all ranks."""
    ones = torch.ones(3)
    dist.all_reduce(ones, op=dist.ReduceOp.AVG)
    assert ones.tolist() == [1.0] * 3
    dist.broadcast(ones, 1)
    gathered = torch.empty(2)
    dist.all_gather_single(gathered, torch.full((1,), float(rank)))
    dist.reduce_scatter_single(torch.empty(1), gathered)
    sent = [rank + peer for peer in range(2)]
    dist.all_to_all_single(torch.empty(sum(sent)), torch.ones(sum(sent)), sent, sent)
    works = [dist.irecv(torch.empty(2), 1 - rank), dist.isend(torch.ones(2), 1 - rank)]
    for work in works:
        work.wait()


def swapped(rank: int) -> None:
    one, other = torch.ones(3), torch.ones(3)
    calls: list[Callable[[], Any]] = [lambda: dist.all_reduce(one), lambda: dist.broadcast(other, 0)]
    for call in calls[:: -1 if rank == 1 else 1]:
        call()


def message(rank: int) -> None:
    dist.send(torch.ones(3), 0) if rank == 1 else dist.recv(torch.ones(4), 1)


def splits(rank: int) -> None:
    expected = [2, 1] if rank == 1 else [1, 1]
    dist.all_to_all_single(torch.empty(sum(expected)), torch.ones(2), expected, [1, 1])


def other_groups(rank: int) -> None:
    for ranks in [[1], [0]] if rank == 1 else [[0], [1]]:
        dist.new_group(ranks, backend="gloo")


# What is wrong -> what a rank does, and what the failure says of it.
FAULTS: dict[str, tuple[Callable[[int], Any], str]] = {
    "order": (swapped, r"(?s)(?=.*all_reduce).*broadcast"),
    "shape": (lambda rank: dist.all_reduce(torch.ones(3 + rank)), r"all_reduce torch.float32 \[4\]"),
    "dtype": (
        lambda rank: dist.all_reduce(torch.ones(3, dtype=torch.bfloat16 if rank else torch.float32)),
        "all_reduce torch.bfloat16",
    ),
    "operation": (
        lambda rank: dist.all_reduce(torch.ones(3), op=dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM),
        "x1 MAX",
    ),
    "root": (lambda rank: dist.broadcast(torch.ones(3), rank), "broadcast torch.float32 .3. x1 from 1"),
    "splits": (splits, "of 0>1, rank . has (2 elements and rank . 1|1 elements and rank . 2)"),
    "message": (message, r"(makes|made) message torch.float32 \[4\]"),
    "missing": (
        lambda rank: rank or dist.all_reduce(torch.ones(3)),
        r"waited in call \d+: all_reduce.*; rank 1: call \d+ of births",
    ),
    "strided": (lambda rank: dist.all_reduce(torch.ones(3, 2).T), "takes contiguous tensors"),
    "half a group": (
        lambda rank: dist.new_group([0], backend="gloo"),
        r"groups over gloo have the ranks \[0\] and leave out the others",
    ),
    "groups": (other_groups, r"(makes|made) group of \[1\] over gloo"),
    "guess": (lambda rank: dist.barrier(group=dist.new_group()), "NCCL would guess the GPU"),
}


def in_a_world(rank: int, fault: str) -> dict[str, int]:
    """Do what is wrong, or all that is right, in the groups of a layout; return the births of groups by backend."""
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("cpu")
    from mega_rl.parallel import groups

    built = groups.initialize(LAYOUT, accelerator=accelerator, timeout_s=TIMEOUT_S)
    assert [dist.get_backend(one) for one in (built.tp, built.host_world)] == [strict_nccl.NAME, "gloo"]
    (FAULTS[fault][0] if fault else right)(rank)
    groups.destroy()
    return dict(strict_nccl.GROUPS)


def test_equal_calls_pass() -> None:
    births = run_ranks(2, in_a_world, "", strict=True)
    assert births[0]["gloo"] == 2, "the world and the replica"
    assert all(one == births[0] for one in births)


def test_training_and_transports_run_on_it(tmp_path: Path) -> None:
    """A covering part of `make test-nccl`: the numbers of an engine and the bytes of every transport are as on gloo."""
    for name in ("qwen3", "one"):
        write_tiny_checkpoint(tmp_path / name, vocab_size=51 if name == "qwen3" else 50, dtype=torch.bfloat16)
    case = {"name": "tp2", "checkpoint": str(tmp_path / "one"), "layout": "tp2-sp", "moves": False}
    strict, usual = (run_ranks(2, run_cases, 2, [case], strict=strict)[0]["tp2"] for strict in (True, False))
    assert strict["metrics"] == pytest.approx(usual["metrics"], rel=1e-6)
    assert torch.equal(strict["outputs"], usual["outputs"])
    assert all(torch.equal(strict["gradients"][name], usual["gradients"][name]) for name in usual["gradients"])
    for answers in run_ranks(2, send_all, str(tmp_path), ["tp2"], strict=True):
        assert "tp2 distributed" in answers
        assert not [name for name, answer in answers.items() if answer["different"]]


@pytest.mark.parametrize("fault", FAULTS if FULL else ["order", "shape", "splits", "half a group"])
def test_fault_is_found_with_both_calls(fault: str) -> None:
    with pytest.raises(RanksFailed, match=FAULTS[fault][1]):
        run_ranks(2, in_a_world, fault, strict=True)
