"""Functions of several responses: the scores of the function of one, and a failure that costs the guilty one alone."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from mega_rl.workers.reward import FunctionRewards
from mega_rl.workers.reward_calls import NoScore, NoScoreError
from mega_rl.workers.reward_functions import resolve
from mega_rl.workers.reward_pool.pool import RewardPool
from mega_rl.workers.reward_pool.process import WorkerOrder
from mega_rl.workers.reward_pool.scorer import PooledRewards
from mega_rl.workers.scoring.sets import load_call
from tests.unit_tests.workers.reward_pool.test_pool import FILE
from tests.unit_tests.workers.reward_pool.test_scorer import outcome_kinds, some

GOOD = tuple(str(number / 7) for number in range(20))


@contextmanager
def pooled(
    functions: str | dict[str, str], *, timeout_s: float = 20.0, num_workers: int = 1, batch_size: int = 8,
    concurrency: int = 0,
) -> Iterator[PooledRewards]:  # fmt: skip
    order = WorkerOrder(functions, 0, concurrency, batch_size)
    pool = RewardPool(order, num_workers=num_workers, timeout_s=timeout_s)
    try:
        yield PooledRewards(load_call(functions), pool)
    finally:
        pool.close()


def of_one(*responses: str) -> Sequence[object]:
    return FunctionRewards(resolve(f"{FILE}:short")).score_texts(some(*responses))


@pytest.mark.parametrize(("function", "concurrency"), [("several", 0), ("several_later", 3)])
def test_scores_are_those_of_the_function_of_one(function: str, concurrency: int) -> None:
    """In workers and in the rank, results that are no number among them, in order."""
    responses = ("1.5", "none", "nan", *GOOD)
    expected = outcome_kinds(of_one(*responses))
    own = FunctionRewards(resolve(f"{FILE}:{function}"), batch_size=4, concurrency=3).score_texts(some(*responses))
    assert outcome_kinds(own) == expected
    assert isinstance(own[2], NoScore)
    assert own[2].what == "the reward function returned nan, which is not finite in float32"
    with pooled(f"{FILE}:{function}", num_workers=2, batch_size=4, concurrency=concurrency) as rewards:
        assert rewards.score_texts(some(*responses)) == own
        assert rewards.score_texts(some(*responses[::-1])) == own[::-1]


@pytest.mark.parametrize(
    ("trouble", "kind", "sizes"),
    [("raise", "error", [4, 1, 1, 1, 1]), ("exit", "error", [4, 1, 1, 1, 1]), ("fewer", "error", [4, 1, 1, 1, 1])],
)
def test_a_batch_that_fails_is_scored_one_by_one(
    trouble: str, kind: str, sizes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the rank and in a worker, which goes on."""
    monkeypatch.setenv("RESPONSES", str(tmp_path / "sizes"))
    if trouble == "fewer":  # alone it gets one score, as it should
        kind = 1.0  # type: ignore[assignment]
    items = some("1", "2", trouble, "3")
    own = FunctionRewards(resolve(f"{FILE}:several")).score_texts(items)
    assert outcome_kinds(own) == [1.0, 2.0, kind, 3.0]
    with pooled(f"{FILE}:several") as rewards:
        assert rewards.score_texts(items) == own
    assert [int(line) for line in (tmp_path / "sizes").read_text().split()] == 2 * sizes


@pytest.mark.parametrize(
    ("function", "trouble", "kind", "concurrency"),
    [
        ("several", "hang", "timeout", 0),
        ("several", "die", "crash", 0),
        ("several_later", "wait", "timeout", 2),
        ("several_later", "raise", "error", 2),
        ("several_later", "die", "crash", 2),
    ],
)
def test_one_of_a_batch_costs_itself_alone(function: str, trouble: str, kind: str, concurrency: int) -> None:
    with pooled(f"{FILE}:{function}", timeout_s=0.5, concurrency=concurrency) as rewards:
        assert outcome_kinds(rewards.score_texts(some("1", "2", trouble, "3"))) == [1.0, 2.0, kind, 3.0]
        assert rewards.score_texts(some("4")) == [4.0]


def test_a_call_has_no_more_responses_than_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESPONSES", str(tmp_path / "sizes"))
    with pooled(f"{FILE}:several", batch_size=8) as rewards:
        rewards.score_texts(some(*GOOD))
    assert [int(line) for line in (tmp_path / "sizes").read_text().split()] == [8, 8, 4]


def test_idle_workers_share_what_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 20 responses each of two workers gets ten, although a call may have 64."""
    monkeypatch.setenv("RESPONSES", str(tmp_path / "sizes"))
    with pooled(f"{FILE}:several", num_workers=2, batch_size=64) as rewards:
        while rewards._pool._waiting._idle < 2:
            time.sleep(0.01)
        rewards.score_texts(some(*GOOD))
    assert [int(line) for line in (tmp_path / "sizes").read_text().split()] == [10, 10]


FUNCTIONS = """
import os, time

def each(response):
    if response == "slow":
        time.sleep(60)
    if response == "ends":
        os._exit(3)
    if response == "left out":
        return None
    time.sleep(0.1 if response == "tired" else 0.0)
    return len(response)

def together(responses):
    assert "left out" not in responses, "called for a response that is left out"
    for response in responses:
        if response == "late":
            time.sleep(60)
        if response == "bad":
            raise ValueError("no")
    return [{"length": len(response)} for response in responses]

async def later(response):
    time.sleep(60 if response == "blocks" else 0)
    await __import__("asyncio").sleep(60 if response == "waits" else 0)
    return 1.0
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    file = tmp_path_factory.mktemp("functions") / "functions.py"
    file.write_text(FUNCTIONS)
    return {name: f"{file}:{name}" for name in ("each", "together")}


def test_a_set_calls_one_function_after_the_other(functions: dict[str, str]) -> None:
    """A function of one and one of several; a response that the first leaves out does not reach the second."""
    items = some("a", "left out", "abc", "bad")
    expected = [{"each": 1.0, "together_length": 1.0}, None, {"each": 3.0, "together_length": 3.0}]
    own = FunctionRewards(load_call(functions)).score_texts(items)  # type: ignore[arg-type]
    assert own[:3] == expected
    assert isinstance(own[3], NoScore)
    assert own[3].what.startswith("the reward function 'together' raised ValueError: no (at ")
    with pooled(functions) as rewards:
        assert rewards.score_texts(items) == own


def test_errors_of_a_set_name_the_function_that_was_running(functions: dict[str, str]) -> None:
    """Deadlines and crashes, of functions of one, of several, and of asynchronous ones."""
    seconds = "took longer than reward.pool.timeout_s=0.5"
    with pooled(functions, timeout_s=0.5) as rewards:
        slow, late, ends, good = rewards.score_texts(some("slow", "late", "ends", "good"))
    assert slow == NoScore("timeout", f"the reward function 'each' {seconds}")
    assert late == NoScore("timeout", f"the reward function 'together' {seconds}")
    crashed = "the reward function 'each' crashed its process, which ended with exit code 3"
    assert ends == NoScore("crash", crashed)
    assert good == {"each": 4.0, "together_length": 4.0}
    one_by_one = {"first": functions["each"], "second": functions["each"]}
    with pooled(one_by_one, timeout_s=0.5, batch_size=0) as rewards:
        assert rewards.score_texts(some("slow")) == [NoScore("timeout", f"the reward function 'first' {seconds}")]
    mixed = {"each": functions["each"], "later": functions["each"].replace(":each", ":later")}
    with pooled(mixed, timeout_s=0.5, batch_size=0, concurrency=4) as rewards:
        waits, blocks = rewards.score_texts(some("waits", "blocks"))
    assert {waits, blocks} == {NoScore("timeout", f"the reward function 'later' {seconds}")}


def test_each_call_of_a_batch_has_the_deadline(functions: dict[str, str]) -> None:
    """Eight calls of 0.1 s are no call of 0.5 s: none is repeated, and none fails."""
    with pooled(functions, timeout_s=0.5) as rewards:
        scores = rewards.score_texts(some(*["tired"] * 8))
    assert scores == [{"each": 5.0, "together_length": 5.0}] * 8


def test_a_function_of_several_scores_one_response_too() -> None:
    call = load_call(f"{FILE}:several")
    assert call.evaluate({"response": "3.5", "prompt_index": 1}) == 3.5
    with pytest.raises(NoScoreError, match="raised ValueError: no such answer"):
        call.evaluate({"response": "raise", "prompt_index": 1})
    assert "RESPONSES" not in os.environ
