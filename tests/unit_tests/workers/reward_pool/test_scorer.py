"""Rewards by a pool: the scores of the function itself, and a stated one for responses that nobody can score."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from mega_rl.protocols import Ranks
from mega_rl.types import Metrics, Prompt
from mega_rl.workers.reward import FunctionRewards, RewardWorker
from mega_rl.workers.reward_calls import NoScore, Response
from mega_rl.workers.reward_functions import resolve
from mega_rl.workers.reward_pool.pool import RewardPool
from mega_rl.workers.reward_pool.process import WorkerOrder
from mega_rl.workers.reward_pool.scorer import PooledRewards
from mega_rl.workers.scoring.failures import FailureRule, Failures, RewardError
from mega_rl.workers.scoring.responses import ResponseReader
from tests.helpers.threads import ThreadGroup
from tests.unit_tests.workers.reward_pool.test_pool import FILE
from tests.unit_tests.workers.test_reward import PROMPTS, rollout_of

Items = list[tuple[Prompt, Response]]


@contextmanager
def pooled(
    function: str, *, timeout_s: float = 20.0, num_workers: int = 1, concurrency: int = 0
) -> Iterator[PooledRewards]:
    spec = f"{FILE}:{function}"
    pool = RewardPool(WorkerOrder(spec, 0, concurrency), num_workers=num_workers, timeout_s=timeout_s)
    try:
        yield PooledRewards(FunctionRewards(resolve(spec)).call, pool)
    finally:
        pool.close()


def some(*responses: str) -> Items:
    prompt = Prompt(index=17, token_ids=(1,), text="1+1=", answer="2")
    return [(prompt, Response(text, num_tokens=1, finish="stop")) for text in responses]


def test_scores_are_those_of_the_function_in_this_process() -> None:
    """Bit for bit, whatever a row holds; and again in the next batch."""
    row = {"π": [1, 0.1, 1e300, None, True], "text": 'é\n"\ud800', "deep": {"a": [[], {}]}, "big": 10**30}
    prompts = [
        Prompt(index=i, token_ids=(1,), text=f"{i}\u2028", answer=["x", i], row=row | {"i": i / 3}) for i in range(20)
    ]
    items = [
        (prompt, Response("answer 🙂", num_tokens=3 + sample // 2, finish="stop" if sample % 2 else "length"))
        for prompt in prompts
        for sample in range(4)
    ]
    expected = FunctionRewards(resolve(f"{FILE}:many_kinds")).score_texts(items)
    assert len(set(map(str, expected))) == len(items)
    with pooled("many_kinds", num_workers=2) as rewards:
        assert rewards.columns == FunctionRewards(resolve(f"{FILE}:many_kinds")).columns
        assert rewards.score_texts(items) == expected
        assert rewards.score_texts(items[::-1]) == expected[::-1]


def test_errors_are_those_of_the_function_in_this_process() -> None:
    """Each costs one response; None is no error."""
    items = some("1", "raise", "exit", "none", "nan", "2")
    own = FunctionRewards(resolve(f"{FILE}:short")).score_texts(items)
    with pooled("short") as rewards:
        assert rewards.score_texts(items) == own
    assert [outcome.kind if isinstance(outcome, NoScore) else outcome for outcome in own] == [
        1.0, "error", "error", None, "error", 2.0,
    ]  # fmt: skip


def test_failed_responses_get_the_stated_score_and_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    items = some("score 1", "hang", "leave", "score -1", "hang")
    failures, alone = Failures(FailureRule(-2.0, 0.6)), ThreadGroup(1).rank(0)
    with pooled("naughty", timeout_s=0.5) as rewards, caplog.at_level(logging.WARNING):
        assert failures.replaced(items, rewards.score_texts(items)) == [1.0, -2.0, -2.0, -1.0, -2.0]
    assert failures.settle(alone) == {"reward/timeouts": 2.0, "reward/crashes": 1.0, "reward/errors": 0.0}  # type: ignore[arg-type]
    assert not any(failures.settle(alone).values())  # type: ignore[arg-type]
    warnings = [record.getMessage() for record in caplog.records if "failure_score" in record.getMessage()]
    assert len(warnings) == 3
    assert warnings[0] == (
        "the reward function took longer than reward.pool.timeout_s=0.5; "
        "prompt 17: '1+1=', response: 'hang', answer: '2'; its score is reward.pool.failure_score=-2"
    )


def test_a_score_that_rewards_failures_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    failures = Failures(FailureRule(0.0, max_share=1.0))
    failures.replaced(some("a"), [-1.0])
    for _ in range(2):
        assert failures.replaced(some("a", "b"), [NoScore("crash", "it crashed"), 1.0]) == [0.0, 1.0]
    warnings = [record.getMessage() for record in caplog.records if "is rewarded" in record.getMessage()]
    assert len(warnings) == 1
    assert "reward.pool.failure_score=0 is above -1" in warnings[0]


def test_a_row_that_does_not_travel_is_an_error() -> None:
    prompt = Prompt(index=17, token_ids=(1,), text="1+1=", answer="2", row={"image": b"\x89PNG"})
    with pooled("many_kinds") as rewards, pytest.raises(RewardError, match="bytes is not JSON serializable") as error:
        rewards.score_texts([(prompt, response) for _, response in some("1")])
    assert "set reward.pool.workers=0" in str(error.value)


@pytest.mark.parametrize("max_share", [0.5, 0.1])
def test_too_many_failed_responses_end_the_run_on_all_ranks(max_share: float) -> None:
    """Three rows of two ranks, of which one crashes: a third."""

    def decode(token_ids: Sequence[int]) -> str:
        return "leave" if 52 in token_ids else f"score {len(token_ids)}"

    reader = ResponseReader(decode, (9,))

    def play(rank: int) -> object:
        ranks = group.rank(rank)
        with pooled("naughty") as rewards:
            worker = RewardWorker(
                rewards,
                reader=reader,
                replica=ranks,
                everyone=ranks,
                timeout_s=60,
                failed=FailureRule(-1.0, max_share),
            )  # type: ignore[arg-type]
            return worker.score(rollout_of(), PROMPTS).totals, worker.metrics(), worker.metrics()

    group = ThreadGroup(2)
    results = group.run(lambda ranks: play(ranks.rank))
    for result in results:
        if max_share == 0.5:
            scores, metrics, after = result
            assert torch.equal(scores, torch.tensor([2.0, -1.0, 0.0]))
            assert metrics.pop("time/reward_call_max_s") > 0.0
            assert metrics.pop("time/reward_latency_s") > 0.0
            assert (metrics, after) == ({"reward/timeouts": 0.0, "reward/crashes": 1.0, "reward/errors": 0.0}, {})
        else:
            assert isinstance(result, RewardError)
            assert "1 of 3 responses have no score: more than reward.pool.max_failed_share=0.1" in str(result)
            assert "prompt 17: '1+1=', response: 'leave'" in str(result)


@pytest.mark.parametrize("function", ["naps", "naps_later"])
@pytest.mark.parametrize("workers", [True, False], ids=["in a worker", "in the rank"])
def test_the_longest_call_of_any_rank_is_a_metric(function: str, workers: bool) -> None:
    """Of six responses on two ranks one takes 0.3 s."""

    def decode(token_ids: Sequence[int]) -> str:
        return "long" if 52 in token_ids else "short"

    reader = ResponseReader(decode, (9,))

    def play(ranks: Ranks) -> Metrics:
        concurrency = 4 if function == "naps_later" else 0
        with pooled(function, concurrency=concurrency) as rewards:
            scorer = rewards if workers else FunctionRewards(resolve(f"{FILE}:{function}"))
            worker = RewardWorker(scorer, reader=reader, replica=ranks, everyone=ranks, timeout_s=60)  # type: ignore[arg-type]
            for _ in range(2):  # the mean of the first has the start of the workers
                worker.score(rollout_of(), PROMPTS)
                metrics = worker.metrics()
            return metrics

    for metrics in ThreadGroup(2).run(play):
        assert 0.3 <= metrics["time/reward_call_max_s"] < 3.0
        assert metrics["time/reward_latency_s"] < metrics["time/reward_call_max_s"]


def outcome_kinds(outcomes: Sequence[object]) -> list[object]:
    return [outcome.kind if isinstance(outcome, NoScore) else outcome for outcome in outcomes]


def test_scores_of_an_asynchronous_function() -> None:
    """Those of the function called once for each response, here and in workers, errors among them."""
    items = some("1.5", "raise", "exit", "none", "nan", *(str(number / 7) for number in range(20)))
    expected = FunctionRewards(resolve(f"{FILE}:short")).score_texts(items)
    own = FunctionRewards(resolve(f"{FILE}:awaited"), concurrency=3).score_texts(items)
    assert outcome_kinds(own) == outcome_kinds(expected)
    with pooled("awaited", num_workers=2, concurrency=4) as rewards:
        assert rewards.score_texts(items) == own
        assert rewards.score_texts(items[::-1]) == own[::-1]


def test_calls_wait_at_the_same_time() -> None:
    """Each of 40 responses waits for all 40 to have begun."""
    begun: list[str] = []

    async def together(response: str) -> float:
        begun.append(response)
        while len(begun) < 40:
            await asyncio.sleep(0.001)
        return float(response)

    scores = FunctionRewards(together, concurrency=40).score_texts(some(*map(str, range(40))))
    assert scores == list(map(float, range(40)))


def test_no_more_calls_at_a_time_than_allowed() -> None:
    running: list[int] = [0, 0]

    async def counted(response: str) -> float:
        running[0] += 1
        running[1] = max(running)
        await asyncio.sleep(0)
        running[0] -= 1
        return 1.0

    FunctionRewards(counted, concurrency=3).score_texts(some(*"abcdefgh"))
    assert running == [0, 3]


@pytest.mark.parametrize(("trouble", "kind"), [("wait", "timeout"), ("block", "timeout"), ("die", "crash")])
def test_one_of_several_at_a_time_costs_itself_alone(trouble: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A coroutine that waits is cancelled; one that blocks the loop or ends the process costs one more worker."""
    monkeypatch.setattr("mega_rl.workers.reward_pool.process.GRACE_S", 0.2)
    with pooled("awaited", timeout_s=0.4, concurrency=8) as rewards:
        assert outcome_kinds(rewards.score_texts(some("1", "2", trouble, "3"))) == [1.0, 2.0, kind, 3.0]
        assert rewards.score_texts(some("4")) == [4.0]
