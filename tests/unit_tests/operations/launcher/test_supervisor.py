"""Decisions from the ends of ranks: causes, exit codes, orders for the others, restarts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mega_rl.operations.launcher.nodes import END, KILL
from mega_rl.operations.launcher.ranks import RankEnd
from mega_rl.operations.launcher.supervisor import (
    GIVE_UP_S,
    INNOCENT_S,
    KILL_S,
    SETTLE_S,
    GenerationState,
    RestartPolicy,
    RunFailure,
    failure_of,
    stop_code,
)
from mega_rl.tracking.health.records import LOST_PEER_CODE, SAVE_S, TIMEOUT_CODE, UNSAID

KILLED = RunFailure("rank 1 was killed", 137)
SAID = RunFailure("rank 0 ended with exit code 1", 1, said=True)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def state(clock: Clock) -> GenerationState:
    return GenerationState(3, clock)


def end(rank: int, code: int) -> RankEnd:
    return RankEnd(rank, 1000 + rank, code)


def due_after(state: GenerationState, clock: Clock, seconds: float) -> str:
    """Return the order after some seconds; there must be none a little earlier."""
    clock.now += seconds - 0.01
    assert state.due() == ""
    clock.now += 0.02
    return state.due()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (1, "ended with exit code 1"),
        (-9, "was killed by SIGKILL: perhaps the machine is out of memory"),
        (-11, "was killed by SIGSEGV"),
        (UNSAID + 75, "ended with exit code 75 before its work was done"),
        (-39, "was killed by signal 39"),  # a real-time signal, which has no name
    ],
)
def test_end_of_a_rank_is_named(code: int, words: str) -> None:
    failure = failure_of([RankEnd(1, 1001, code)], world_size=2)
    assert failure is not None
    assert failure.cause == f"rank 1 (process 1001) {words}"


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ((143, 143), 143),
        ((0, 0), 0),  # it was through when the signal came
        ((), 143),
        ((-15, LOST_PEER_CODE), 143),
        ((143, 1), 1),
        ((2, 143), 2),
        ((-9, -9), 143),  # they took too long
        ((-11, 143), 139),
        ((0, UNSAID), 1),
    ],
)
def test_stopped_run_has_an_exit_code(codes: tuple[int, ...], code: int) -> None:
    assert stop_code([end(rank, one) for rank, one in enumerate(codes)], 15) == code


def test_ranks_that_end_well_end_the_run(state: GenerationState) -> None:
    for rank in range(3):
        assert not state.over
        state.add(end(rank, 0))
    state.lose([1, 2], "node 1 is gone")  # a node that leaves now is no loss
    assert state.over
    assert state.failure is None


@pytest.mark.parametrize(
    ("act", "after_s", "cause", "code"),
    [
        (lambda state: state.add(end(1, -11)), SETTLE_S, "rank 1 (process 1001) was killed by SIGSEGV", 139),
        (lambda state: state.add(end(0, 2)), 0.01, "rank 0 (process 1000) ended with exit code 2", 2),
        (lambda state: state.add(end(0, LOST_PEER_CODE)), INNOCENT_S,
         "rank 0 (process 1000) lost the connection to ranks 1 and 2, which had not ended", 1),
        (lambda state: state.add(end(0, TIMEOUT_CODE)), INNOCENT_S,
         "rank 0 (process 1000) waited trainer.timeout_s in a collective for ranks 1 and 2, which had not ended", 1),
        (lambda state: state.fail("rank 1 is stuck"), 0.01, "rank 1 is stuck", 1),
        (lambda state: state.lose([1, 2], "node 1 is gone"), 0.01, "node 1 is gone", 1),
    ],
    ids=["killed", "mistake", "lost peer", "timeout", "stuck", "lost node"],
)  # fmt: skip
def test_failure_ends_the_other_ranks(
    state: GenerationState, clock: Clock, act: Callable[[GenerationState], None], after_s: float, cause: str, code: int,
) -> None:  # fmt: skip
    act(state)
    assert not state.running
    clock.now -= 0.01 if after_s == 0.01 else 0.0  # at once
    assert due_after(state, clock, after_s) == END
    assert state.due() == ""
    for other in state.left:
        state.add(end(other, -1))
    assert state.over
    assert state.failure is not None
    assert (state.failure.cause, state.failure.code) == (cause, code)


@pytest.mark.parametrize(
    ("codes", "words", "may_go_on"),
    [
        ((LOST_PEER_CODE, 1), "rank 1", True),
        ((TIMEOUT_CODE, 1), "rank 1", True),
        ((1, 2), "rank 1", False),
        ((0, LOST_PEER_CODE), "another rank", True),
    ],
)
def test_rank_at_fault_explains_the_others(codes: tuple[int, ...], words: str, may_go_on: bool) -> None:
    failure = failure_of([end(number, code) for number, code in enumerate(codes)], world_size=2)
    assert failure is not None
    assert words in failure.cause
    assert failure.may_go_on is may_go_on


def test_innocent_rank_gives_the_one_at_fault_time(state: GenerationState, clock: Clock) -> None:
    state.add(end(0, LOST_PEER_CODE))
    clock.now += INNOCENT_S / 2
    assert state.due() == ""
    state.add(end(2, 1))
    assert due_after(state, clock, SETTLE_S) == END


@pytest.mark.parametrize("by_rank", [False, True])
def test_stop_gives_time_to_save_and_ends_in_a_kill(state: GenerationState, clock: Clock, by_rank: bool) -> None:
    state.add(end(0, 143)) if by_rank else state.stop()
    assert due_after(state, clock, SAVE_S) == KILL
    assert not state.over
    clock.now += GIVE_UP_S
    assert state.over


def test_ranks_stopped_while_they_start_are_innocent(state: GenerationState, clock: Clock) -> None:
    state.stop()
    state.add(end(0, -15))
    clock.now += INNOCENT_S / 2
    assert state.due() == ""


def test_ranks_that_no_kill_ends_are_given_up(state: GenerationState, clock: Clock) -> None:
    state.add(end(0, -9))
    assert due_after(state, clock, SETTLE_S) == END
    state.add(end(1, -1))
    assert due_after(state, clock, KILL_S) == KILL
    assert not state.over
    clock.now += GIVE_UP_S
    assert state.over
    assert state.left == [2]


def test_faults_are_tried_until_restarts_are_used_up() -> None:
    policy = RestartPolicy(2)
    assert policy.refusal(KILLED, step=3, progressed=True) is None
    assert policy.refusal(KILLED, step=5, progressed=True) is None
    assert policy.refusal(KILLED, step=7, progressed=True) == "after step 7: --max-restarts=2 are used up"


def test_fault_at_the_same_step_is_given_up() -> None:
    policy = RestartPolicy(5)
    assert policy.refusal(KILLED, step=3, progressed=True) is None
    given_up = "again after step 3, where it failed before the restart: given up"
    assert policy.refusal(KILLED, step=3, progressed=True) == given_up


@pytest.mark.parametrize(
    ("failure", "progressed", "again"),
    [
        (KILLED, False, True),
        (SAID, True, True),
        (SAID, False, False),
        (RunFailure("a mistake", 2, said=True), True, False),
        (RunFailure("stopped", 143), True, False),
    ],
)
def test_only_some_failures_are_tried_again(failure: RunFailure, progressed: bool, again: bool) -> None:
    assert (RestartPolicy(1).refusal(failure, step=0, progressed=progressed) is None) is again
    assert RestartPolicy(0).refusal(failure, step=0, progressed=progressed) == ""
