from __future__ import annotations

import signal
import threading
import time
from functools import partial

import pytest
import torch

from mega_rl.errors import HungError, RunError, UserError
from mega_rl.parallel.agreement import (
    INTERRUPT,
    all_failures,
    broadcast_json,
    first_failure,
    raise_together,
    run_beside_meetings,
    run_on_all,
    run_on_one,
)
from mega_rl.parallel.comm import GroupRanks, SingleRank
from mega_rl.rewards.score import RewardError
from tests.helpers.distributed import run_ranks


def _world(timeout_s: float) -> GroupRanks:
    from datetime import timedelta

    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=60.0))
    dist.barrier()  # a rank that starts late is none of these tests' business
    return GroupRanks(dist.new_group(timeout=timedelta(seconds=timeout_s)))


def _long_work(rank: int) -> object:
    ranks = _world(timeout_s=2.0)

    def work() -> object:
        assert rank == 1
        assert threading.current_thread() is not threading.main_thread()
        time.sleep(3.5)
        return {"port": 31000}

    return run_on_one(work, ranks, source=1, beat_s=0.5)


def test_all_ranks_get_what_one_worked_out_though_it_took_longer_than_a_collective_may() -> None:
    assert run_ranks(2, _long_work, device="cpu") == [{"port": 31000}] * 2


def _cancelled_work(rank: int) -> tuple[str, float]:
    """Rank 1 fails at once; rank 0 would work for a minute, and fails when it is cancelled."""
    ranks = _world(timeout_s=30.0)
    cancelled = threading.Event()
    began = time.monotonic()

    def work() -> None:
        if rank == 1:
            raise RunError("node 1 has no memory")
        cancelled.wait(60)
        raise RunError("given up")

    def cancel() -> None:
        cancelled.set()

    try:
        run_on_all(work, ranks, beat_s=0.2, cancel=cancel)
    except RunError as error:
        return str(error), time.monotonic() - began
    return "nothing", 0.0


def test_work_that_another_ranks_failure_makes_useless_is_cancelled_and_not_blamed() -> None:
    for said, seconds in run_ranks(2, _cancelled_work, device="cpu"):
        assert said == "node 1 has no memory"
        assert seconds < 20


def _work_on_the_main_thread(rank: int) -> list[object]:
    """Rank 1 works for longer than a collective may take, in health; then it is stalled."""
    ranks = _world(timeout_s=2.0)

    def work() -> bool:
        time.sleep(3.0 * rank)
        return threading.current_thread() is threading.main_thread()

    results: list[object] = [run_beside_meetings(work, ranks, stalled=lambda: None, beat_s=0.5)]

    def stalled() -> None:
        while rank == 1:
            time.sleep(0.05)

    try:
        run_beside_meetings(stalled, ranks, stalled=lambda: f"rank {rank} waits for prompt 17", beat_s=0.5)
    except RunError as error:
        results.append(f"{type(error).__name__}: {error}")
    return results


def test_ranks_meet_on_another_thread_while_the_main_thread_works_until_one_is_stalled() -> None:
    """The rank that is stalled is interrupted, and the other learns of it."""
    results = run_ranks(2, _work_on_the_main_thread, device="cpu")
    reason = "rank 1 waits for prompt 17"
    assert results == [[True, f"StalledError: {reason}"], [True, f"HungError: {reason}"]]


def test_the_stalled_work_of_a_single_rank_is_interrupted() -> None:
    before = signal.getsignal(INTERRUPT)

    def work() -> None:
        while True:
            time.sleep(0.01)

    with pytest.raises(HungError, match="waits for prompt 3"):
        run_beside_meetings(work, SingleRank(), stalled=lambda: "waits for prompt 3", beat_s=0.1)
    assert signal.getsignal(INTERRUPT) is before


class LateMeeting(SingleRank):
    """A meeting that the work has ended before: others came late to it."""

    def __init__(self, ended: threading.Event) -> None:
        self.ended = ended

    def max(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor[1]:
            self.ended.set()
            time.sleep(0.5)
        return super().max(tensor)


def _ends_in_the_meeting(rank: int) -> str:
    ended = threading.Event()
    try:
        run_beside_meetings(ended.wait, LateMeeting(ended), stalled=lambda: "waits for prompt 3", beat_s=0.1)
    except RunError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_stalled_work_that_ends_while_ranks_meet_is_not_interrupted_any_more() -> None:
    """The signal would find no handler, and end the process."""
    assert run_ranks(1, _ends_in_the_meeting, device="cpu") == ["StalledError: waits for prompt 3"]


def _failing_work(rank: int) -> list[str]:
    ranks, messages = _world(timeout_s=60.0), []

    def work(kind: type[Exception]) -> None:
        raise kind("port 31000 is taken")

    for kind in (UserError, RunError, ValueError):
        try:
            run_on_one(partial(work, kind), ranks, beat_s=0.3)
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


def _agreements(rank: int) -> list[object]:
    ranks = _world(timeout_s=60.0)
    results: list[object] = [
        broadcast_json({"ü": [rank, None]}, ranks, source=1),
        first_failure(None, ranks),
        first_failure(f"rank {rank} \ud800" if rank else None, ranks),
        first_failure("" if rank else None, ranks),
        [list(part) if isinstance(part, dict) else part for part in all_failures(f"{rank}", ranks, most=2)],
    ]
    for failure in (None, RunError("disk full") if rank == 2 else None):
        try:
            raise_together(failure, ranks, error=RewardError)
            results.append("none")
        except RunError as error:
            results.append(f"{type(error).__name__}: {error}")
    return results


def test_all_ranks_learn_the_same() -> None:
    """Values, the first failure of several, an empty message, and an exception's own class on the rank that raised."""
    common = [{"ü": [1, None]}, None, "rank 1 \\ud800", "?", [[0, 1], 3], "none"]
    others = "RewardError: disk full"
    assert run_ranks(3, _agreements, device="cpu") == [
        [*common, others],
        [*common, others],
        [*common, "RunError: disk full"],
    ]


def test_a_failure_reaches_every_rank() -> None:
    """Another rank's own class of exceptions is not known to all: it arrives as RunError."""
    own = [f"{name}: port 31000 is taken" for name in ("UserError", "RunError", "ValueError")]
    assert run_ranks(2, _failing_work, device="cpu") == [own, [*own[:2], "RunError: port 31000 is taken"]]
