"""Generation on a thread: rows, errors and deadlines reach every rank, and nothing hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from mega_rl.parallel.comm import SingleRank
from mega_rl.types import Prompt, Rollout
from mega_rl.workers.ahead import BackgroundRolloutError, ThreadedRollouts
from tests.helpers.rollouts import make_rollout
from tests.helpers.threads import OneRank, ThreadGroup

PROMPTS = [Prompt(index=7, token_ids=(2, 3), text="p", answer="a")]


def threaded(
    generate: Callable[[Sequence[Prompt], int], Any], *, ranks: Any = None, timeout_s: float = 10.0, **settings: Any
) -> ThreadedRollouts:
    everyone = ranks or SingleRank()
    return ThreadedRollouts(generate, lambda rows: rows, everyone=everyone, timeout_s=timeout_s, **settings)


def test_the_rows_are_those_of_the_prompts_and_the_step() -> None:
    """`start` returns before anything is generated; generation is on another thread, collecting on the caller's."""
    go, places = threading.Event(), []

    def generate(prompts: Sequence[Prompt], step: int) -> Rollout:
        assert go.wait(10)
        places.append(threading.current_thread())
        assert (list(prompts), step) == (PROMPTS, 4)
        return make_rollout([2, 3])

    def collect(rows: Rollout) -> Rollout:
        places.append(threading.current_thread())
        return rows

    rollouts = ThreadedRollouts(generate, collect, everyone=SingleRank(), timeout_s=10.0)
    rollouts.start(PROMPTS, step=4)
    go.set()
    assert rollouts.finish().lengths.tolist() == [4, 5]
    assert places[0] is not threading.main_thread()
    assert places[1] is threading.main_thread()
    assert places[0].daemon
    rollouts.start(PROMPTS, step=4)  # the next one may begin
    rollouts.finish()


def test_every_rank_hears_of_an_error_on_one() -> None:
    """The others' rows are there; without word of it they would collect, and wait for rank 1 in that collective."""
    group = ThreadGroup(3)

    def work(ranks: OneRank) -> Rollout:
        def generate(prompts: Sequence[Prompt], step: int) -> Rollout:
            if ranks.rank == 1:
                raise KeyError("lost")
            return make_rollout([1])

        rollouts = threaded(generate, ranks=ranks)
        rollouts.start(PROMPTS, step=2)
        return rollouts.finish()

    results = group.run(work)
    assert all(isinstance(result, BackgroundRolloutError) for result in results)
    assert len({str(result) for result in results}) == 1
    assert "KeyError: 'lost'" in str(results[0])
    assert isinstance(results[1].__cause__, KeyError)


@pytest.mark.parametrize("wait", ["finish", "drain"])
def test_a_generation_that_never_ends_is_an_error_on_every_rank(wait: str) -> None:
    """In the time that was given, whatever thread is still running."""
    group, never = ThreadGroup(2), threading.Event()

    def work(ranks: OneRank) -> None:
        rollouts = threaded(
            lambda *_: never.wait() if ranks.rank else make_rollout([1]), ranks=ranks, timeout_s=0.5, beat_s=0.1
        )
        rollouts.start(PROMPTS, step=6)
        getattr(rollouts, wait)()

    begin = time.monotonic()
    results = group.run(work)
    assert time.monotonic() - begin < 5.0
    never.set()
    assert all(isinstance(result, BackgroundRolloutError) for result in results)
    assert all("waited 0.5 s for the generation of step 6" in str(result) for result in results)
