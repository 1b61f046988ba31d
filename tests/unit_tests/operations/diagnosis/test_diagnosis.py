"""Causes that records, exit codes and process states tell."""

from __future__ import annotations

from typing import Any

import pytest

from mega_rl.operations.diagnosis import name_cause
from mega_rl.operations.observations import Observations, Stacks
from mega_rl.tracking.health.records import UNSAID, LastWords, PhaseRecord, Place
from tests.unit_tests.operations.diagnosis.examples import NOW, RUNNING, STOPPED, call, late, record, seen

DP_OF_0 = call("dp", 17, 0, 2)
TP_OF_2, WORLD = call("tp", 311, 2, 3), call("world", 5, 0, 1, 2, 3)
STACK = 'Thread 7 (idle): "MainThread"\n    f (mega_rl/x.py:3)\nThread 8 (idle): "heartbeat"'
REWARD = Place("helper", "/home/me/agent.py", 31, users="score")


CASES: dict[str, tuple[Observations, str]] = {
    "stopped": (
        seen(
            late(0, DP_OF_0), late(1, WORLD), record(2), late(3, TP_OF_2),
            states={2: STOPPED}, stacks={2: Stacks(STOPPED, "", STACK)},
        ),
        "rank 2 (pid 102, node7) is stopped (state T) at f (mega_rl/x.py:3), last seen in 'update actor' of step 3, "
        "while rank 0 waits for it in dp all_reduce 17",
    ),
    "in a reward": (
        seen(
            late(0, DP_OF_0), late(1, None), late(3, None),
            record(2, phases=(PhaseRecord("reward", 700.0),), place=REWARD),
        ),
        "rank 2 (pid 102, node7) is in reward function score at /home/me/agent.py:31 in 'reward' of step 3, "
        "while rank 0 waits for it in dp all_reduce 17",
    ),
    "the end of a chain of waits": (
        seen(record(0, waiting=DP_OF_0), record(1), record(2, waiting=call("tp", 311, 2, 3)), record(3)),
        "rank 3 (pid 103, node7) is in forward at /lib/layers.py:12 in 'update actor' of step 3, "
        "while rank 2 waits for it in tp all_reduce 311",
    ),
    "silent in the kernel": (
        seen(late(0, DP_OF_0), record(1), record(2, beat=NOW - 90), record(3), states={2: "D"}),
        "rank 2 (pid 102, node7) has given no sign of life for 90 s, process state D: in the kernel, where nothing "
        "interrupts it: a file system or a device does not answer; last seen in forward at /lib/layers.py:12 in "
        "'update actor' of step 3, while rank 0 waits for it in dp all_reduce 17",
    ),
    "killed": (
        seen(late(0, DP_OF_0, "lost peer"), record(2, memory={"resident": 3_000_000_000}), exits={0: 75, 2: -9}),
        "rank 2 (pid 102, node7) was killed by SIGKILL, last seen in 'update actor' of step 3",
    ),
    "an exit with code 0 in a reward": (
        seen(record(0, waiting=DP_OF_0), record(2, phases=(PhaseRecord("reward", 7.0),), place=REWARD),
                 exits={2: UNSAID}),
        "rank 2 (pid 102, node7) ended with exit code 0 before its work was done, last seen in reward function score "
        "at /home/me/agent.py:31 in 'reward' of step 3",
    ),
    "NCCL's watchdog aborts the innocent": (
        seen(record(0, waiting=call("dp", 17, 0, 2, age_s=601.0)), record(2), exits={0: -6}),
        "rank 2 (pid 102, node7) is in forward at /lib/layers.py:12 in 'update actor' of step 3, "
        "while rank 0 waits for it in dp all_reduce 17",
    ),
    "diverged": (
        seen(
            late(0, DP_OF_0), late(1, call("tp", 310, 0, 1)), record(2, waiting=WORLD), record(3, waiting=WORLD),
        ),
        "diverged: rank 2 waits in world all_reduce 5 while rank 0 waits for it in dp all_reduce 17",
    ),
    "each group in a collective of its own": (
        seen(
            record(0, waiting=DP_OF_0), record(1, waiting=call("dp", 17, 1, 3)),
            record(2, waiting=DP_OF_0), record(3, waiting=call("dp", 17, 1, 3)),
        ),
        "all ranks of each group wait, ranks 0 and 2 in dp all_reduce 17, ranks 1 and 3 in dp all_reduce 17: "
        "the network between them, or the device, does not answer",
    ),
    "all in one collective": (
        seen(*(record(rank, waiting=WORLD) for rank in range(4))),
        "all ranks wait in world all_reduce 5: the network between them, or the device, does not answer",
    ),
    "an error of another rank than 0": (
        seen(record(1, ended=LastWords("error", "disk full", 2, "checkpoint")), late(0, DP_OF_0, "lost peer"),
                 exits={1: 1}),
        "rank 1 (pid 101, node7) failed in 'checkpoint' of step 3: disk full",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("facts", "cause"), CASES.values(), ids=CASES)
def test_cause_is_named(facts: Observations, cause: str) -> None:
    named = name_cause(facts)
    assert named is not None
    assert named.startswith(cause), named


@pytest.mark.parametrize("code", [0, 2, 143])
def test_rank_that_spoke_or_was_stopped_is_no_cause(code: int) -> None:
    ended = record(0, ended=LastWords("error", "data: no such file", None, ""))
    assert name_cause(seen(ended, exits={0: code})) is None
    assert name_cause(seen(record(0), exits={0: code})) is None


def test_run_at_work_has_no_cause() -> None:
    assert name_cause(seen(exits={0: -9})) is None
    assert name_cause(seen(*(record(rank) for rank in range(4)))) is None


def test_rank_killed_after_a_hang_is_not_blamed() -> None:
    """It ends the others with SIGTERM, and stopped ones with SIGKILL."""
    states: dict[str, Any] = {"states": {2: STOPPED, 3: RUNNING}}
    named = name_cause(seen(late(0, DP_OF_0), record(2), record(3), exits={0: 76, 3: -15, 2: -9}, **states))
    assert named is not None
    assert named.startswith("rank 2 (pid 102, node7) is stopped")


def test_kill_for_memory_is_named() -> None:
    facts = seen(record(2), exits={2: -9})
    for ran_out, words in (
        (True, "the kernel has killed a process for lack of memory"),
        (False, "perhaps out of memory"),
    ):
        assert words in (name_cause(facts, memory_ran_out=ran_out) or "")
