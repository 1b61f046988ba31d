"""Causes and exit codes from the ends of ranks."""

from __future__ import annotations

import pytest

from mega_rl.health.endings import UNSAID
from mega_rl.launcher.outcome import RunFailure, ending, failure_of, stop_code
from mega_rl.launcher.ranks import LOST_PEER, RankEnd
from mega_rl.launcher.restarts import RestartPolicy

KILLED = RunFailure("rank 1 was killed", 137, rank=1)
SAID = RunFailure("rank 0 ended with exit code 1", 1, rank=0, said=True)


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
def test_the_signal_that_killed_a_rank_is_named(code: int, words: str) -> None:
    assert ending(code) == words


def test_well_ended_ranks_are_no_failure() -> None:
    assert failure_of([RankEnd(0, 1, 0), RankEnd(1, 2, 0)], world_size=2) is None


def test_lost_connections_of_all_ranks_name_no_rank_to_blame() -> None:
    failure = failure_of([RankEnd(1, 7, LOST_PEER), RankEnd(0, 8, LOST_PEER)], world_size=2)
    assert failure is not None
    assert failure.cause == "rank 1 (process 7) lost the connection to another rank, which says no more"
    assert failure.code == 1
    assert failure.may_go_on


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ((143, 143), 143),
        ((0, 0), 0),  # it was through when the signal came
        ((), 143),
        ((-15, LOST_PEER), 143),
        ((143, 1), 1),
        ((2, 143), 2),
        ((-9, -9), 143),  # they took too long
        ((-11, 143), 139),
        ((0, UNSAID), 1),
    ],
)
def test_exit_codes_of_a_stopped_run(codes: tuple[int, ...], code: int) -> None:
    assert stop_code([RankEnd(rank, 9, one) for rank, one in enumerate(codes)], 15) == code


def test_faults_at_other_steps_are_tried_until_restarts_are_used_up() -> None:
    policy = RestartPolicy(2)
    assert policy.refusal(KILLED, step=3, progressed=True) is None
    assert policy.refusal(KILLED, step=5, progressed=True) is None
    assert policy.refusal(KILLED, step=7, progressed=True) == "after step 7: --max-restarts=2 are used up"


def test_a_fault_at_the_same_step_is_given_up() -> None:
    policy = RestartPolicy(5)
    assert policy.refusal(KILLED, step=3, progressed=True) is None
    assert policy.refusal(KILLED, step=3, progressed=True) == (
        "again after step 3, where it failed before the restart: given up"
    )


def test_other_nodes_may_have_a_fault_at_the_same_step() -> None:
    policy = RestartPolicy(5)
    assert policy.refusal(KILLED, step=3, progressed=True) is None
    policy.forgive()
    assert policy.refusal(KILLED, step=3, progressed=True) is None


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
def test_what_may_be_tried_again(failure: RunFailure, progressed: bool, again: bool) -> None:
    assert (RestartPolicy(1).refusal(failure, step=0, progressed=progressed) is None) is again
    assert RestartPolicy(0).refusal(failure, step=0, progressed=progressed) == ""
