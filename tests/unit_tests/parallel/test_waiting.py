from __future__ import annotations

import threading
import time

import pytest

from mega_rl.errors import RunError, UserError
from mega_rl.parallel.comm import GroupRanks
from mega_rl.parallel.waiting import result_of
from tests.helpers.distributed import run_ranks


def _world(timeout_s: float) -> GroupRanks:
    from datetime import timedelta

    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    assert dist.group.WORLD is not None
    return GroupRanks(dist.group.WORLD)


def _long_work(rank: int) -> object:
    ranks = _world(timeout_s=5.0)

    def work() -> object:
        assert rank == 1
        assert threading.current_thread().name == "result_of"
        time.sleep(7)
        return {"port": 31000}

    return result_of(ranks, work, source=1, beat_s=1.0)


def test_all_ranks_get_what_one_worked_out_though_it_took_longer_than_a_collective_may() -> None:
    assert run_ranks(2, _long_work, device="cpu") == [{"port": 31000}] * 2


def _failing_work(rank: int, kind: str) -> str:
    ranks = _world(timeout_s=60.0)
    errors = {"user": UserError, "run": RunError, "bug": ValueError}

    def work() -> None:
        raise errors[kind]("port 31000 is taken")

    try:
        result_of(ranks, work, beat_s=0.3)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("kind", "own", "others"),
    [("user", "UserError", "UserError"), ("run", "RunError", "RunError"), ("bug", "ValueError", "RunError")],
)
def test_a_failure_reaches_every_rank(kind: str, own: str, others: str) -> None:
    message = "port 31000 is taken"
    assert run_ranks(2, _failing_work, kind, device="cpu") == [f"{own}: {message}", f"{others}: {message}"]
