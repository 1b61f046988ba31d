"""Environments over a policy of fixed answers: limits, failures, deadlines, and trajectories that wait for nobody."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest

from mega_rl.agents import environment
from mega_rl.agents.environment import Answer, Environment, Played, Policy, Runner, TurnQueue, TurnRequest, in_batches
from mega_rl.agents.trajectory import Trajectory, Turn
from mega_rl.errors import RunError
from mega_rl.types import Prompt
from tests.helpers.selection import FULL

HOSTILE = 10_000 if FULL else 400  # trajectories, of which every tenth goes wrong


def answer(requests: Sequence[TurnRequest]) -> list[Answer]:
    """Answer each with the number of tokens read, then a stop token, as far as the limit goes."""
    return [
        Turn(ids, (-0.5,) * len(ids), (), len(ids) == 2)
        for ids in ((len(one.token_ids) % 90 + 2, 1)[: one.limit] for one in requests)
    ]


def play(own: Any, count: int = 8, sample: Any = answer, limit: int = 40) -> list[Played]:
    """Play `count` trajectories; nothing is left behind by then."""
    prompt = Prompt(3, (4, 5, 6), "p", "")
    made = [Trajectory(prompt, number // 2, number % 2, limit) for number in range(count)]
    runner, queues = Runner(own, "rollout.source='agent.py:Own'", vocab_size=100), list[TurnQueue]()

    def sample_turns(asked: TurnQueue) -> None:
        queues.append(asked)
        in_batches(asked, sample)

    outcomes = runner.run(made, sample_turns)
    assert (queues[-1].playing, queues[-1]._open) == (0, {})
    blocked = len(queues) - 1  # each made the others run again
    # An end frees caches; what had ended before another one blocked does not run again.
    ended = set[tuple[int, int]]().union(*(one.ended for one in queues))
    left = [one for one in outcomes if (one.trajectory.prompt_index, one.trajectory.sample_index) not in ended]
    assert len(left) <= blocked
    assert all(one.failure == "timeout" for one in left)
    places = [(one.trajectory.prompt_index, one.trajectory.sample_index) for one in outcomes]
    assert places == [(number // 2, number % 2) for number in range(count)]  # each ends exactly once
    return outcomes


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "GRACE_S", 0.3)


@dataclass
class Turns(Environment):
    """Two turns, and a tool in between that takes a while."""

    seconds: float = 0.0

    async def run(self, policy: Policy, prompt: Prompt, trajectory: Trajectory) -> None:
        await policy.turn()
        await asyncio.sleep(self.seconds if trajectory.prompt_index else 0.0)
        trajectory.give([50, 51])
        await policy.turn(limit=1)


def test_turns_read_all_that_came_before() -> None:
    asked: list[TurnRequest] = []

    def sample(requests: Sequence[TurnRequest]) -> list[Answer]:
        asked.extend(requests)
        return answer(requests)

    outcomes = play(Turns(), 2, sample)
    assert [one.trajectory.branch.token_ids for one in outcomes] == [(4, 5, 6, 5, 1, 50, 51, 9)] * 2
    assert sorted(asked) == [
        TurnRequest((4, 5, 6), (0, 0, 0), 40), TurnRequest((4, 5, 6), (0, 1, 0), 40),
        TurnRequest((4, 5, 6, 5, 1, 50, 51), (0, 0, 1), 1), TurnRequest((4, 5, 6, 5, 1, 50, 51), (0, 1, 1), 1),
    ]  # fmt: skip
    assert [(one.failure, one.trajectory.end) for one in outcomes] == [(None, "length")] * 2


def test_a_slow_tool_stops_nobody_else() -> None:
    """The first prompt's trajectories have both of their turns while the others' tools still work."""
    turns: list[tuple[float, int, int]] = []
    begin = time.monotonic()

    def sample(requests: Sequence[TurnRequest]) -> list[Answer]:
        turns.extend((time.monotonic() - begin, one.key[0], one.key[2]) for one in requests)
        return answer(requests)

    play(Turns(seconds=0.6), 8, sample)
    assert all(second < 0.5 for second, prompt, number in turns if prompt == 0 or number == 0)
    assert all(second > 0.5 for second, prompt, number in turns if prompt and number)


@dataclass
class Hostile(Environment):
    """Trajectories by number: hang, crash, garbage, megabytes, swallowed cancellations, and good ones."""

    timeout_s: float = field(default=60.0 if FULL else 1.5, kw_only=True)
    ends: list[int] = field(default_factory=list)  # numbers, as they end

    async def run(self, policy: Policy, prompt: Prompt, trajectory: Trajectory) -> None:
        number = (2 * trajectory.prompt_index + trajectory.sample_index) % 100
        try:
            await self.play(number, policy, trajectory)
        finally:
            self.ends.append(number)

    async def play(self, number: int, policy: Policy, trajectory: Trajectory) -> None:
        if number == 0:
            return
        await policy.turn()
        if number == 1:
            await asyncio.Event().wait()
        if number == 2:
            raise ValueError("a tool broke")
        if number == 3:
            trajectory.give("hello")  # type: ignore[arg-type]
        if number == 4:
            trajectory.give([7] * (1 << 20))
        if number == 5:
            trajectory.give([5000])
        if number == 6:
            trajectory.end = "never"  # type: ignore[assignment]
            return
        while number == 7:
            try:
                await asyncio.sleep(3000)
            except asyncio.CancelledError:
                continue
        if number == 8:
            raise asyncio.CancelledError("the tool has gone")
        if number == 9:
            while True:
                await policy.turn(limit=1)
        if number == 10:
            async with asyncio.TaskGroup() as group:
                for _ in range(2):
                    group.create_task(policy.turn(trajectory.open(trajectory.prompt.token_ids), limit=99))
        await policy.turn()


def test_each_of_many_hostile_trajectories_ends_once_with_its_kind(caplog: pytest.LogCaptureFixture) -> None:
    """No task, thread, process or open file is left, and those that hang hold up no other."""
    own, process = Hostile(max_turns=5), psutil.Process()
    before = (process.num_fds(), process.children(recursive=True), threading.active_count())
    with caplog.at_level(logging.CRITICAL):  # asyncio names tasks that let no cancellation through
        outcomes = play(own, HOSTILE)
        gc.collect()
    kinds = Counter((number % 100, one.failure, one.trajectory.end) for number, one in enumerate(outcomes))
    ends = {number: "timeout" if number in (1, 7) else "error" for number in (0, 1, 2, 3, 5, 6, 7, 8)}
    share = HOSTILE // 100
    expected = {(number, failure, "error"): share for number, failure in ends.items()}
    expected |= {(4, None, "length"): share, (9, None, "turns"): share}
    expected |= {(number, None, "done"): share for number in range(10, 100)}
    assert kinds == expected
    assert Counter(own.ends) == dict.fromkeys(range(100), share)
    hung = [number in (1, 7) for number in own.ends]
    assert all(hung[hung.index(True) :])
    assert len(outcomes[9].trajectory.turns) == 5
    assert "ValueError: a tool broke" in outcomes[2].what
    assert "outside the model's vocabulary of 100" in outcomes[5].what
    assert "was cancelled" in outcomes[8].what
    assert not [one for one in gc.get_objects() if isinstance(one, asyncio.Task) and not one.done()]
    assert (process.num_fds(), process.children(recursive=True), threading.active_count()) == before


@dataclass
class Blocks(Environment):
    """One trajectory that never awaits."""

    timeout_s: float = field(default=0.3, kw_only=True)
    times: list[int] = field(default_factory=list)

    async def run(self, policy: Policy, prompt: Prompt, trajectory: Trajectory) -> None:
        await policy.turn()
        self.times.append(trajectory.prompt_index)
        if (trajectory.prompt_index, trajectory.sample_index) == (1, 0):
            time.sleep(2.0)


def test_a_blocking_environment_costs_its_sample_and_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """The others run again on another loop, with the same requests."""
    own = Blocks()
    outcomes = play(own, 6)
    assert [one.failure for one in outcomes] == [None, None, "timeout", None, None, None]
    assert [one.trajectory.end for one in outcomes if one.failure is None] == ["done"] * 5
    assert "blocked the event loop" in caplog.text
    assert "test_environment.py" in caplog.text


def test_environments_that_all_block_end_the_run() -> None:
    class All(Blocks):
        async def run(self, policy: Policy, prompt: Prompt, trajectory: Trajectory) -> None:
            time.sleep(1.5)

    with pytest.raises(RunError, match=r"Own': environments blocked the event loop for more than timeout_s=0\.3"):
        play(All(), 8)


def test_the_time_of_the_policy_is_not_the_environments() -> None:
    def slow(requests: Sequence[TurnRequest]) -> list[Answer]:
        time.sleep(0.5)
        return answer(requests)

    outcomes = play(Turns(timeout_s=0.4), 2, slow)
    assert [one.failure for one in outcomes] == [None] * 2
    assert all(one.seconds < 0.4 for one in outcomes)


def test_an_engine_without_an_answer_costs_the_sample_and_its_error_the_run() -> None:
    def sample(requests: Sequence[TurnRequest]) -> list[Answer]:
        return ["turn" if one.key[1] else good for one, good in zip(requests, answer(requests), strict=True)]

    assert [one.failure for one in play(Turns(), 4, sample)] == [None, "turn", None, "turn"]

    def broken(requests: Sequence[TurnRequest]) -> list[Answer]:
        raise RunError("the weights have diverged")

    with pytest.raises(RunError, match="diverged"):
        play(Turns(), 4, broken)
