"""The reward role: what is scored, what components and failures are worth, and errors that every rank hears of."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from mega_rl.errors import UserError
from mega_rl.rewards.role import RewardComponents, TextScorer
from mega_rl.rewards.score import Item, Outcome, ResponseReader, RewardError, RewardFailure
from mega_rl.types import Rewards, Rollout, ends_of
from tests.helpers.threads import ThreadGroup
from tests.unit_tests.rewards.reward_cases import PROMPTS, READER, called, pooled, rollout_of

ALONE: Any = ThreadGroup(1).rank(0)


def scorer_of(source: Any, ranks: Any = ALONE, everyone: Any = None, **settings: Any) -> TextScorer:
    """Return the reward role of a rank over functions, or a source."""
    source = source if hasattr(source, "score") else called(source)
    everyone = ranks if everyone is None else everyone
    return TextScorer(source, replica=ranks, everyone=everyone, **{"reader": READER, "timeout_s": 60.0} | settings)


def score_on(size: int, source: Any, *, replicas: int = 1, **settings: Any) -> list[Any]:
    """Return what `score` returns or raises on each rank of replicas of `size` ranks; each scores the same rows."""
    groups = [ThreadGroup(size) for _ in range(replicas)]

    def work(ranks: Any) -> Rewards | Exception:
        own = {name: value() if callable(value) else value for name, value in settings.items()}
        replica = groups[ranks.rank // size].rank(ranks.rank % size)
        try:
            return scorer_of(source, replica, ranks, **own).score(rollout_of(), PROMPTS)
        except (RewardError, UserError) as error:
            return error

    return ThreadGroup(size * replicas).run(work)


def totals(function: Callable[..., object], **settings: Any) -> list[float]:
    (rewards,) = score_on(1, function, **settings)
    assert isinstance(rewards, Rewards), rewards
    return rewards.totals.tolist()


def test_functions_see_texts_facts_and_tokens() -> None:
    """The stop token is counted as rollout/response_tokens_mean counts it, and is in no text and no list of tokens."""
    calls: list[tuple[object, ...]] = []

    def function(prompt, response, answer, finish, num_tokens, turns, transcript, token_ids, prompt_ids):  # type: ignore[no-untyped-def]
        calls.append((prompt, response, answer, finish, num_tokens, turns, transcript, token_ids, prompt_ids))
        return len(calls) / 2

    (rewards,) = score_on(1, function)
    assert calls == [
        ("2+3=", "50,51", "5", "stop", 3, ["50,51"], "50,51", [50, 51], [3]),
        ("1+1=", "52,53,54", "2", "length", 3, ["52,53,54"], "52,53,54", [52, 53, 54], [1, 2]),
        ("2+3=", "", "5", "stop", 1, [""], "", [], [3]),
    ]
    assert rewards.totals.dtype == torch.float32
    assert rewards.totals.tolist() == [0.5, 1.0, 1.5]


def of_several_turns(*, finished: bool) -> Rollout:
    """One row: two turns of the policy, between them and before the first what a tool wrote, stop tokens too.

    It is cut off where the answer to its last turn did not fit, which a stop token ended all the same.
    """
    return Rollout.from_rows(
        torch.tensor([[3, 90, 50, 51, 9, 91, 9, 92, 52, 9, 0]]),
        prompt_lengths=torch.tensor([1]),
        lengths=torch.tensor([10]),
        loss_mask=torch.tensor([[False, False, True, True, True, False, False, False, True, True, False]]),
        end=ends_of(torch.tensor([finished])),
        prompt_index=torch.tensor([1]),
    )


@pytest.mark.parametrize("finished", [True, False])
def test_texts_of_tools_are_not_the_response(finished: bool) -> None:
    """A function sees the policy's own turns, one a line, and `transcript` is all of it, without stop tokens."""
    calls: list[tuple[object, ...]] = []

    def function(response: str, turns: list[str], transcript: str, num_tokens: int, finish: str) -> float:
        calls.append((response, turns, transcript, num_tokens, finish))
        return 1.0

    rollout = of_several_turns(finished=finished)
    scorer_of(function).score(rollout, PROMPTS)
    assert calls == [("50,51\n52", ["50,51", "52"], "90,50,51,91,9,92,52", 5, "stop" if finished else "length")]
    assert READER.written(rollout, 0) == ("50,51\n52", "90,50,51,91,9,92,52")


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ranks_share_responses_and_all_get_every_score(size: int) -> None:
    """Each response is scored once, on as many ranks as there are responses for; the order of rows stays."""
    calls: list[tuple[int, str]] = []
    together = threading.Barrier(min(size, 3))

    def function(prompt: str, response: str, answer: str) -> float:
        calls.append((threading.get_ident(), response))
        if size >= 3:
            together.wait(timeout=20)  # no rank waits for another's scores
        return float(len(response))

    results = score_on(size, function)
    assert sorted(response for _, response in calls) == ["", "50,51", "52,53,54"]
    assert len({rank for rank, _ in calls}) == min(size, 3)
    assert all(result.totals.tolist() == [5.0, 8.0, 0.0] for result in results)


class TextlessError(Exception):
    """An exception that cannot be shown."""

    def __str__(self) -> str:
        raise ValueError("no text")


class Nameless:
    """A value that cannot be shown."""

    def __repr__(self) -> str:
        raise ValueError("no repr")


def raising(error: BaseException) -> object:
    raise error


FIRST, SECOND = "prompt 23: '2+3=', response: '50,51', answer: '5'", "; prompt 17: '1+1=', response: '52,53,54', answer"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (float("nan"), "returned nan, which is not finite in float32"),
        (float("-inf"), "returned -inf, which is not finite in float32"),
        (1e300, "returned 1e+300, which is not finite in float32"),
        ([], "returned [], which is not a number"),
        ("0.5", "returned '0.5', which is not a number"),
        (np.bool_(True), "which is not a number; wrap it in float()"),
        (10**400, "(401 characters), which is not finite in float32"),
        ("x" * 1000, "... (1002 characters), which is not a number"),
        (Nameless(), "the reward function raised ValueError: no repr (at "),
        (TextlessError(), "the reward function raised TextlessError: "),
        (KeyError("é\ud800"), f"(at {__file__}:"),
        (SystemExit("enough"), "raised SystemExit: enough (at "),
    ],
)
def test_error_without_a_rule_ends_all_ranks(value: object, expected: str) -> None:
    results = score_on(2, lambda response: raising(value) if isinstance(value, BaseException) else value)
    assert all(isinstance(result, RewardError) for result in results)
    assert "3 of 3 responses have no score" in str(results[0])
    assert expected in str(results[0])
    assert FIRST in str(results[0])


def test_failed_samples_and_no_rows_are_not_scored() -> None:
    """The function does not see them: an empty answer may be one it cannot take."""
    rollout, seen = rollout_of(), []
    rollout.failed = torch.tensor([False, True, False])

    def function(prompt: str, response: str, answer: str) -> float:
        seen.append(prompt)
        return 7.0

    scorer = scorer_of(function)
    assert scorer.score(rollout, PROMPTS).totals.tolist() == [7.0, 0.0, 7.0]
    assert seen == ["2+3=", "2+3="]
    assert scorer.score(rollout_of()[:0], PROMPTS).totals.shape == (0,)


def in_parts(response: str) -> dict[str, float]:
    return {"length": len(response), "first": float(response[:2] or 0) / 7, "shown": 0.5}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_components_reach_every_rank_with_their_weighted_sum(size: int) -> None:
    """In alphabetical order, also on a rank without a response; the sum is one of float64, rounded once."""
    for rewards in score_on(size, in_parts, components=lambda: RewardComponents({"length": -0.1, "shown": 0.0})):
        assert (rewards.parts.names, rewards.parts.weights) == (("first", "length", "shown"), (1.0, -0.1, 0.0))
        expected = [[50 / 7, 5.0, 0.5], [52 / 7, 8.0, 0.5], [0.0, 0.0, 0.5]]
        assert torch.equal(rewards.parts.values, torch.tensor(expected))
        assert torch.equal(rewards.totals, torch.tensor([50 / 7 - 0.5, 52 / 7 - 0.8, 0.0]))


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ({"a": 1.0}, "the reward {'a': 1.0} has not the parts a, b, as those of other responses" + SECOND),
        ({"a": 1, "b": 2, "c": 3}, "has not the parts a, b, as those of other responses" + SECOND),
        (0.5, "the reward 0.5 has not the parts a, b" + ", as those of other responses" + SECOND),
        ({"a": 1.0, "b": math.nan}, "returned {'a': 1.0, 'b': nan}, whose part 'b' is not finite in float32" + SECOND),
        ({"a": 1.0, "b": {"c": 1.0}}, "whose part 'b' is not a number" + SECOND),
        ({"a": 1.0, "b 2": 1.0}, "whose part 'b 2' is not named by letters, digits, _, or has the name of another"),
        ({"a": 1.0, "mean": 1.0}, "whose part 'mean' is not named by letters, digits, _, or has the name of another"),
        ({}, "returned {}, which has no part" + SECOND),
        ({"a": 3e38, "b": 3e38}, "the weighted sum of the parts {'a': 3e+38, 'b': 3e+38} is not finite in"),
    ],
)
@pytest.mark.parametrize("size", [1, 2])
def test_components_that_differ_are_an_error_on_every_rank(size: int, odd: object, message: str) -> None:
    for error in score_on(size, lambda response: odd if response == "52,53,54" else {"a": 0.0, "b": 1.0}):
        assert isinstance(error, RewardError)
        assert message in str(error)


class HalfFailed:
    """The first response cannot be scored."""

    def score(self, items: Sequence[Item], report: object) -> list[Outcome]:
        return [RewardFailure("timeout", "too long"), *called(in_parts).score(items)[1:]]


FAILING = {"failure_score": -1.0, "max_failed_share": 1.0}


def test_failed_response_gets_its_score_in_every_component() -> None:
    scorer = scorer_of(HalfFailed(), components=RewardComponents({"length": 0.5}), **FAILING)
    rewards = scorer.score(rollout_of(), PROMPTS)
    assert rewards.parts is not None
    assert rewards.parts.values[0].tolist() == [-1.0, -1.0, -1.0]
    assert float(rewards.totals[0]) == -2.5


def test_response_that_is_left_out_is_nan_on_every_rank() -> None:
    for result in score_on(2, lambda prompt, response: None if prompt == "2+3=" else 1.0):
        assert str(result.totals.tolist()) == "[nan, 1.0, nan]"


@pytest.mark.parametrize("max_share", [0.5, 0.1])
@pytest.mark.parametrize("score", [-1.0, None])
def test_exception_costs_one_response_its_reward(
    score: float | None, max_share: float, caplog: pytest.LogCaptureFixture
) -> None:
    """In the rank itself as in workers; a response whose components differ from the others' has no score either."""

    def function(prompt: str, response: str) -> object:
        return raising(SystemExit("enough")) if prompt == "1+1=" else {"a": 1.0}

    for reward in (function, lambda prompt, response: {"b" if prompt == "1+1=" else "a": 1.0}):
        scorer = scorer_of(reward, failure_score=score, max_failed_share=max_share)
        if max_share < 1 / 3:
            with pytest.raises(RewardError, match=r"1 of 3 responses have no score, more than .* prompt 17: '1\+1='"):
                scorer.score(rollout_of(), PROMPTS)
            continue
        scored = scorer.score(rollout_of(), PROMPTS).totals.tolist()
        assert str(scored) == ("[1.0, nan, 1.0]" if score is None else "[1.0, -1.0, 1.0]")
        counts = {name: count for name, count in scorer.metrics().items() if name.startswith("reward/")}
        assert counts == {"reward/timeouts": 0.0, "reward/crashes": 0.0, "reward/errors": 1.0}
    assert "raised SystemExit: enough" in caplog.text
    assert f"answer: '2'; its score is {'none' if score is None else -1.0}" in caplog.text


@pytest.mark.parametrize("max_share", [0.4, 0.1])
def test_failures_of_all_ranks_are_compared_with_the_share(max_share: float) -> None:
    """Three rows of two ranks, of which one crashes a worker: a third."""
    reader = ResponseReader(lambda ids: "leave" if 52 in ids else f"score {len(ids)}", (9,))

    def play(ranks: Any) -> object:
        with pooled("naughty", alone=False) as source:
            scorer = scorer_of(source, ranks, reader=reader, failure_score=-1.0, max_failed_share=max_share)
            return scorer.score(rollout_of(), PROMPTS).totals, scorer.metrics(), scorer.metrics()

    for result in ThreadGroup(2).run(play):
        if max_share == 0.1:
            assert isinstance(result, RewardError)
            assert "1 of 3 responses have no score, more than the share of 0.1 that may fail" in str(result)
            assert "prompt 17: '1+1='" in str(result)
            continue
        scores, metrics, after = result
        assert torch.equal(scores, torch.tensor([2.0, -1.0, 0.0]))
        assert metrics.pop("time/reward_latency_s") > 0.0
        assert (metrics, after) == ({"reward/timeouts": 0.0, "reward/crashes": 1.0, "reward/errors": 0.0}, {})


SOURCES = {"sums/easy": ["correct", "form"], "chat": ["polite"]}
MIXED = [dataclasses.replace(PROMPTS[0], source="chat"), dataclasses.replace(PROMPTS[1], source="sums/easy")]


def correct(response: str, answer: str) -> float:
    return float(answer in response)


def form(prompt: str, response: str, answer: str) -> Mapping[str, float]:
    return {"short": 1.0 - len(response) / 8, "box": 0.25}


def polite(response: str) -> float:
    return float(len(response)) / 7


def scored_of_sources(size: int, sources: Mapping[str, list[str]], weights: dict[str, float], **more: Any) -> list[Any]:
    """Return the rewards of a rollout of both sources, of the second of two steps, on each rank of one replica."""
    functions = {"correct": correct, "form": form, "polite": polite, **more.pop("functions", {})}

    def work(ranks: Any) -> Rewards:
        source = called(*functions.items(), sources=sources)
        scorer = scorer_of(source, ranks, components=RewardComponents(weights, sources=tuple(sources)), **more)
        scorer.score(rollout_of(), MIXED)
        return scorer.score(rollout_of(), MIXED)

    return ThreadGroup(size).run(work)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_components_that_a_source_lacks_are_nan_and_in_no_sum(size: int) -> None:
    """Rows 0 and 2 are sums, row 1 is chat; the same on every rank."""
    nan = math.nan
    expected = torch.tensor([[1.0, 0.25, 1 - 5 / 8, nan], [nan, nan, nan, 8 / 7], [0.0, 0.25, 1.0, nan]])
    for rewards in scored_of_sources(size, SOURCES, {"form_short": 2.0, "polite": -1.0}):
        assert rewards.parts.names == ("correct", "form_box", "form_short", "polite")
        assert rewards.parts.weights == (1.0, 1.0, 2.0, -1.0)
        assert torch.equal(rewards.parts.values.nan_to_num(-9), expected.nan_to_num(-9))
        assert torch.equal(rewards.totals, torch.tensor([1.25 + 2 * (1 - 5 / 8), -8 / 7, 2.25]))
