"""Orders for the ranks of a run, by the time and the ends of others."""

from __future__ import annotations

import pytest

from mega_rl.launcher.ranks import LOST_PEER, WAITED_IN_VAIN, RankEnd
from mega_rl.launcher.warden import SAVE_S
from mega_rl.launcher.watch import GIVE_UP_S, INNOCENT_S, KILL_S, LATE_S, SETTLE_S, Due, GenerationWatch


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watch(clock: Clock) -> GenerationWatch:
    return GenerationWatch(3, clock)


def end(rank: int, code: int) -> RankEnd:
    return RankEnd(rank, 1000 + rank, code)


def due_after(watch: GenerationWatch, clock: Clock, seconds: float) -> Due:
    """Return the order after some seconds; there must be none a little earlier."""
    clock.now += seconds - 0.01
    assert watch.due() is Due.NOTHING
    clock.now += 0.02
    return watch.due()


def test_ranks_that_end_well_end_the_run(watch: GenerationWatch) -> None:
    for rank in range(3):
        assert not watch.over
        watch.add(end(rank, 0))
    assert watch.over
    assert watch.failure is None


def test_a_failure_ends_the_others_after_a_moment(watch: GenerationWatch, clock: Clock) -> None:
    watch.add(end(1, -11))
    assert not watch.running
    assert due_after(watch, clock, SETTLE_S) is Due.END
    assert watch.due() is Due.NOTHING
    watch.add(end(0, -1))
    watch.add(end(2, -9))
    assert watch.over
    assert watch.failure is not None
    assert (watch.failure.rank, watch.failure.code) == (1, 139)
    assert [one.rank for one in watch.ends] == [1], "the ends that were ordered explain nothing"


def test_a_mistake_ends_them_at_once(watch: GenerationWatch) -> None:
    watch.add(end(0, 2))
    assert watch.due() is Due.END


def test_a_mistake_explains_more_than_the_failure_before_it(watch: GenerationWatch) -> None:
    watch.add(end(0, 1))
    watch.add(end(1, 2))
    assert watch.due() is Due.END
    assert watch.failure is not None
    assert watch.failure.code == 2
    assert not watch.failure.may_go_on


@pytest.mark.parametrize(("code", "within_s"), [(LOST_PEER, INNOCENT_S), (WAITED_IN_VAIN, LATE_S)])
def test_an_innocent_rank_waits_for_the_one_at_fault(
    watch: GenerationWatch, clock: Clock, code: int, within_s: float
) -> None:
    watch.add(end(0, code))
    clock.now += within_s / 2
    assert watch.due() is Due.NOTHING
    watch.add(end(2, 1))
    assert due_after(watch, clock, SETTLE_S) is Due.END
    assert watch.failure is not None
    assert watch.failure.rank == 2


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (LOST_PEER, "rank 0 (process 1000) lost the connection to rank 1, 2, which had not ended"),
        (WAITED_IN_VAIN, "rank 0 (process 1000) waited trainer.timeout_s in a collective for rank 1, 2, which had not"),
    ],
)
def test_without_one_at_fault_the_silent_ranks_are_named(
    watch: GenerationWatch, clock: Clock, code: int, words: str
) -> None:
    watch.add(end(0, code))
    assert due_after(watch, clock, LATE_S if code == WAITED_IN_VAIN else INNOCENT_S) is Due.END
    assert watch.failure is not None
    assert watch.failure.cause.startswith(words)
    assert (watch.failure.code, watch.failure.rank) == (1, None)


def test_a_stop_gives_time_to_save_and_ends_in_a_kill(watch: GenerationWatch, clock: Clock) -> None:
    watch.stop()
    assert due_after(watch, clock, SAVE_S) is Due.KILL
    assert not watch.over
    clock.now += GIVE_UP_S
    assert watch.over


def test_a_rank_that_was_stopped_from_elsewhere_stops_all(watch: GenerationWatch, clock: Clock) -> None:
    """The ranks agree on it: the others are saving, too."""
    watch.add(end(0, 143))
    assert due_after(watch, clock, SAVE_S) is Due.KILL


def test_ranks_stopped_while_they_start_die_of_it(watch: GenerationWatch, clock: Clock) -> None:
    watch.stop()
    watch.add(end(0, -15))
    clock.now += INNOCENT_S / 2
    assert watch.due() is Due.NOTHING


def test_stuck_ranks_are_ended_at_once(watch: GenerationWatch) -> None:
    watch.fail("rank 1 is stuck")
    assert watch.due() is Due.END
    watch.add(end(0, -1))
    assert watch.failure is not None
    assert (watch.failure.cause, watch.failure.code) == ("rank 1 is stuck", 1)


def test_a_lost_node_takes_its_ranks_along(watch: GenerationWatch) -> None:
    watch.lose([1, 2], "node 1 is gone")
    assert watch.due() is Due.END
    watch.add(end(0, -1))
    assert watch.over
    assert watch.failure is not None
    assert watch.failure.cause == "node 1 is gone"


def test_a_node_that_leaves_when_its_ranks_have_ended_is_no_loss(watch: GenerationWatch) -> None:
    for rank in range(3):
        watch.add(end(rank, 0))
    watch.lose([1, 2], "node 1 is gone")
    assert watch.failure is None


def test_ranks_that_not_even_a_kill_ends_are_given_up(watch: GenerationWatch, clock: Clock) -> None:
    watch.add(end(0, -9))
    assert due_after(watch, clock, SETTLE_S) is Due.END
    watch.add(end(1, -1))
    assert due_after(watch, clock, KILL_S) is Due.KILL
    assert not watch.over
    clock.now += GIVE_UP_S
    assert watch.over
    assert watch.left == [2]
