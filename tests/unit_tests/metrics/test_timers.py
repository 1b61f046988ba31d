"""PhaseTimer with a clock that the test moves."""

from __future__ import annotations

import pytest

from mega_rl.metrics.timers import PhaseTimer


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_phases_add_up_to_the_step() -> None:
    clock = Clock()
    timer = PhaseTimer(clock=clock)
    with timer.phase("generate"):
        clock.now += 3.0
    clock.now += 0.5
    for seconds in (1.0, 4.0):
        with timer.phase("update_actor"):
            clock.now += seconds
    clock.now += 1.5
    assert timer.metrics() == {
        "time/generate_s": 3.0,
        "time/update_actor_s": 5.0,
        "time/step_s": 10.0,
        "time/coverage": pytest.approx(0.8),
    }


def test_a_step_begins_where_the_last_one_was_read() -> None:
    clock = Clock()
    timer = PhaseTimer(clock=clock)
    with timer.phase("generate"):
        clock.now += 1.0
    timer.metrics()
    with timer.phase("log"):
        clock.now += 2.0
    assert timer.metrics() == {"time/log_s": 2.0, "time/step_s": 2.0, "time/coverage": 1.0}
    clock.now += 7.0
    timer.reset()
    clock.now += 1.0
    assert timer.metrics() == {"time/step_s": 1.0, "time/coverage": 0.0}


def test_nested_phases_are_refused() -> None:
    timer = PhaseTimer()
    outer, inner = timer.phase("generate"), timer.phase("reward")
    with pytest.raises(RuntimeError, match="'reward' starts inside phase 'generate'"), outer, inner:
        pass
    with timer.phase("reward"):
        pass
    assert {"time/generate_s", "time/reward_s"} <= timer.metrics().keys()


def test_device_is_waited_for_at_both_ends() -> None:
    clock = Clock()
    calls: list[float] = []

    def synchronize() -> None:
        calls.append(clock.now)
        clock.now += 10.0  # the queue drains while waiting

    timer = PhaseTimer(synchronize=synchronize, clock=clock)
    with timer.phase("update_actor"):
        clock.now += 1.0
    assert calls == [100.0, 111.0]
    assert timer.metrics()["time/update_actor_s"] == 11.0, "work queued before the phase is not its own, its own is"


def test_a_phase_that_fails_is_still_closed() -> None:
    clock = Clock()
    timer = PhaseTimer(clock=clock)

    def fail() -> None:
        clock.now += 2.0
        raise KeyError("user")

    with pytest.raises(KeyError), timer.phase("reward"):
        fail()
    assert timer.metrics()["time/reward_s"] == 2.0


def test_empty_step_is_covered() -> None:
    assert PhaseTimer(clock=Clock()).metrics() == {"time/step_s": 0.0, "time/coverage": 1.0}
