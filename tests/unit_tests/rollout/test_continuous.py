"""Turns in a running batch with kept caches, against each turn computed by itself from its first token."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

from mega_rl.agents.environment import Environment, Policy, Runner, TurnQueue, TurnRequest, TurnSampling
from mega_rl.agents.trajectory import LimitReached, Trajectory, Turn
from mega_rl.rollout import continuous, decoding, embedded
from mega_rl.rollout.continuous import KeptCaches, RunningBatch
from mega_rl.types import Prompt
from tests.unit_tests.rollout.tiny_qwen3 import VOCAB_SIZE, Checkpoint, make_checkpoint, make_engine, make_prompts

HOW = TurnSampling((12, 4))  # no uniform lies within rounding of the end of a token
LENGTHS = [5, 1, 9, 3]
STOPS = list(range(0, VOCAB_SIZE, 8))


class Agent(Environment):
    """Three turns with tokens to read between them, then a fork of the first and a branch with another opening."""

    async def run(self, policy: Policy, prompt: Prompt, trajectory: Trajectory) -> None:
        for number in range(3):
            await policy.turn(limit=3 + trajectory.sample_index)
            trajectory.give([7 + number, 9][: 1 + trajectory.prompt_index % 2])
        fork = trajectory.fork(trajectory.branches[0], 1)
        trajectory.give([20, 21], fork)
        await policy.turn(fork, limit=4)
        if trajectory.prompt_index % 2:
            await policy.turn(trajectory.open((*prompt.token_ids[:-1], 30, 31)), limit=4)


class Sampled(NamedTuple):
    request: TurnRequest
    turn: Turn


def play(engine: Any, own: Environment, *, n: int = 3) -> list[Trajectory]:
    made = [Trajectory(one, index, i, 40) for index, one in enumerate(make_prompts(LENGTHS)) for i in range(n)]
    outcomes = Runner(own, "rollout.source='agent.py:Own'", VOCAB_SIZE).run(made, partial(engine.turns, how=HOW))
    assert [one.what for one in outcomes] == [""] * len(made)
    return [one.trajectory for one in outcomes]


def sampled(trajectories: Sequence[Trajectory]) -> Iterator[Sampled]:
    for one in trajectories:
        for branch in one.branches:
            context, number = branch.opening, 0
            for place, part in enumerate(branch.parts):
                if not isinstance(part, Turn):
                    context += part
                    continue
                if place >= branch.shared:
                    key = (one.prompt_index, one.sample_index, branch.number << 16 | number)
                    yield Sampled(TurnRequest(context, key, len(part.token_ids)), part)
                context, number = context + part.token_ids, number + 1


def assert_from_scratch(checkpoint: Checkpoint, trajectories: Sequence[Trajectory], **changes: Any) -> None:
    """Each turn is what it is without any other turn, and its log-probs are those of transformers' own forward."""
    engine = make_engine(checkpoint, **{"stop_token_ids": STOPS, **changes})
    for request, turn in sampled(trajectories):
        asked = TurnQueue()
        (answer := asked.put(request)).add_done_callback(lambda _, asked=asked: asked.close())
        engine.turns(asked, HOW)
        alone = answer.result()
        assert isinstance(alone, Turn)
        assert alone.token_ids == turn.token_ids, request
        torch.testing.assert_close(torch.tensor(alone.logprobs), torch.tensor(turn.logprobs), rtol=0, atol=1e-5)
        ids = torch.tensor([request.token_ids + turn.token_ids])
        with torch.no_grad():
            logprobs = checkpoint.model(ids).logits[0, len(request.token_ids) - 1 : -1].log_softmax(-1)
        own = logprobs.gather(1, ids[0, len(request.token_ids) :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(turn.logprobs), own, rtol=0, atol=1e-5)


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[RunningBatch]:
    """The running batches of the test."""
    made = list[RunningBatch]()

    def make(*arguments: Any, **given: Any) -> RunningBatch:
        made.append(RunningBatch(*arguments, **given))
        return made[-1]

    monkeypatch.setattr(embedded, "RunningBatch", make)
    return made


@pytest.mark.parametrize(("batch_size", "looks"), [(64, {"cpu": 1}), (5, {"cpu": 1}), (64, {}), (2, {})])
def test_turns_equal_turns_from_scratch(
    checkpoint: Checkpoint, batch_size: int, looks: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In batches that all rows fit, that few fit, and that look every 16 tokens at who has ended."""
    monkeypatch.setattr(decoding, "CHECK_TOKENS", looks)
    engine = make_engine(checkpoint, stop_token_ids=STOPS, batch_size=batch_size)
    trajectories = play(engine, Agent())
    assert {turn.stopped for _, turn in sampled(trajectories)} == {True, False}
    assert_from_scratch(checkpoint, trajectories)


def test_a_next_turn_reads_only_new_tokens(checkpoint: Checkpoint, batches: list[RunningBatch]) -> None:
    trajectories = play(make_engine(checkpoint, stop_token_ids=STOPS), Agent())
    every = sum(len(request.token_ids) for request, _ in sampled(trajectories))
    prompts = sum(LENGTHS)  # once for all samples of a prompt
    later = sum(2 + one.prompt_index % 2 for one in trajectories) * 2  # the stop, and what was given
    branches = sum(2 + 2 * (one.prompt_index % 2) for one in trajectories)  # equal ones that enter together: once
    assert prompts < batches[0].read_tokens <= prompts + later + branches < every / 3


def test_weights_of_another_version_have_caches_of_their_own(checkpoint: Checkpoint, tmp_path: Any) -> None:
    engine = make_engine(checkpoint, stop_token_ids=STOPS)
    play(engine, Agent())
    other = make_checkpoint(tmp_path, seed=5)
    engine.load_weights(other.model.state_dict().items())
    engine.finish_update(2)
    assert_from_scratch(other, play(engine, Agent()))


def test_the_oldest_caches_and_those_of_ended_trajectories_are_dropped() -> None:
    kept, requests = KeptCaches(2), [TurnRequest((3, 4), (0, sample, 0), 1) for sample in range(3)]
    for one in requests:
        kept.put(one, continuous.RowCache(one.token_ids, ()))
    assert [one in kept for one in requests] == [False, True, True]
    kept.put(requests[1]._replace(key=(0, 1, 1)), continuous.RowCache((3, 4, 5), ()))  # a later turn of the branch
    kept.put(requests[0], continuous.RowCache((3, 4), ()))
    assert [one in kept for one in requests] == [True, True, False]
    assert kept.longest(TurnRequest((3, 4, 5, 6), (0, 1, 2), 1))[0] == 3
    assert kept.longest(TurnRequest((3, 4, 5), (0, 1, 2), 1))[0] == 2  # one token is read
    assert kept.longest(TurnRequest((3, 9, 5), (0, 1, 2), 1))[0] == 1
    kept.drop({(0, 1)})
    assert [one in kept for one in requests] == [True, False, False]


class SlowTool(Environment):
    """The first trajectory's tool ends after all others; one that waits for a batch would never end."""

    def __init__(self, count: int) -> None:
        super().__init__(timeout_s=30.0)
        self.left, self.ends = count, list[tuple[int, int]]()

    async def run(self, policy: Policy, prompt: Prompt, trajectory: Trajectory) -> None:
        await policy.turn(limit=3)
        while trajectory.prompt_index == trajectory.sample_index == 0 and self.left > 1:
            await asyncio.sleep(0.005)
        try:
            for _ in range(2):
                trajectory.give([9])
                await policy.turn(limit=3)
        except LimitReached:
            raise AssertionError("there is room") from None
        self.left -= 1
        self.ends.append((trajectory.prompt_index, trajectory.sample_index))


@pytest.mark.parametrize("batch_size", [64, 2])
def test_a_slow_tool_stops_nobody_else(checkpoint: Checkpoint, batch_size: int) -> None:
    own = SlowTool(16)
    trajectories = play(make_engine(checkpoint, stop_token_ids=STOPS, batch_size=batch_size), own, n=4)
    assert own.ends[-1] == (0, 0)
    assert_from_scratch(checkpoint, trajectories)


@dataclass(kw_only=True)
class Impatient(Environment):
    """The second sample's turn is long; the first one's is cancelled after some tokens, or left behind."""

    begun: threading.Event
    leaves: bool

    async def run(self, policy: Policy, prompt: Prompt, trajectory: Trajectory) -> None:
        if trajectory.sample_index:
            await policy.turn(limit=30)
            return
        turn = asyncio.create_task(policy.turn(limit=30))
        await asyncio.to_thread(self.begun.wait)
        if self.leaves:
            trajectory.end = "done"
            return
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        await policy.turn(limit=2)


@pytest.mark.parametrize("leaves", [False, True])
def test_a_cancelled_turn_decodes_no_further_token(
    checkpoint: Checkpoint, batches: list[RunningBatch], leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its row leaves before the next token, its cache is freed, and the other row does not change."""
    begun, counts = threading.Event(), list[int]()
    advance = RunningBatch.advance

    def watched(self: RunningBatch) -> bool:
        counts.append(len(self.rows))
        has_ended = advance(self)
        assert not self.rows or {len(layer.keys) for layer in self._cache.layers} == {len(self.rows)}  # type: ignore[union-attr]
        if len(counts) == 4:
            begun.set()
            end = time.monotonic() + 5.0
            while not any(row.answer.cancelled() for row in self.rows) and time.monotonic() < end:
                time.sleep(0.001)
        return has_ended

    monkeypatch.setattr(RunningBatch, "advance", watched)
    made = [Trajectory(make_prompts([5])[0], 0, sample, 40) for sample in range(2)]
    engine = make_engine(checkpoint, stop_token_ids=[131])
    runner = Runner(Impatient(begun=begun, leaves=leaves), "rollout.source='agent.py:Own'", VOCAB_SIZE)
    first, second = runner.run(made, partial(engine.turns, how=HOW))
    turns = [*first.trajectory.turns, *second.trajectory.turns]
    assert len(turns) == (1 if leaves else 2)
    assert counts[:5] == [2, 2, 2, 2, 1] or not leaves
    assert sum(counts) == 4 + sum(len(one.token_ids) for one in turns)
    assert len(turns[-1].token_ids) > 5
    assert batches[0].rows == []
    assert not hasattr(batches[0], "_cache")
    monkeypatch.undo()
    assert_from_scratch(checkpoint, [second.trajectory], stop_token_ids=[131])
