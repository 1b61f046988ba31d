"""Reward functions get the arguments that they ask for, and give a score for each response."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest

from mega_rl.rewards.build import source_problems
from mega_rl.rewards.call import plan
from mega_rl.rewards.score import Response, RewardFailure
from mega_rl.types import Prompt
from tests.unit_tests.rewards.reward_cases import called, some
from tests.unit_tests.rewards.test_role import SOURCES, correct, form

ROW = {"question": "3+4=", "label": "7", "difficulty": 2}
PROMPT = Prompt(index=5, token_ids=(1,), text="3+4=", answer="7", messages=(("user", "3+4="),), row=ROW)
TEXTS = ("3+4=", "8", "7")


def everything(prompt, response, answer, row, messages, prompt_index, finish, num_tokens):  # type: ignore[no-untyped-def]
    return prompt, response, answer, row, messages, prompt_index, finish, num_tokens


class Scorer:
    def __call__(self, prompt: str, response: str, answer: str, scale: float = 2.0, **rest: Any) -> Any:
        return prompt, response, answer, scale, rest


def returned(function: Callable[..., object], prompt: Prompt, response: str) -> object:
    planned = plan(function)
    return planned([planned.arguments(prompt, Response(response, num_tokens=3, finish="length"))])


@pytest.mark.parametrize(
    ("function", "value"),
    [
        (everything, (*TEXTS, ROW, [{"role": "user", "content": "3+4="}], 5, "length", 3)),
        (lambda response, *, num_tokens, finish, limit=2: (num_tokens, finish, limit), (3, "length", 2)),
        (lambda answer, response: (answer, response), ("7", "8")),
        (lambda *, response, row: (response, row), ("8", ROW)),
        (lambda response: response, "8"),
        (Scorer(), (*TEXTS, 2.0, {})),
        (partial(Scorer(), scale=3.0), (*TEXTS, 3.0, {})),
    ],
)
def test_arguments_go_by_the_signature(function: Callable[..., object], value: object) -> None:
    assert returned(function, PROMPT, "8") == value


def test_answer_is_passed_as_it_is_and_a_row_as_a_copy() -> None:
    prompt = Prompt(index=0, token_ids=(1,), text="a", answer={"tests": ["f(1) == 2"]}, row=ROW)
    assert returned(lambda response, answer: answer, prompt, "") == {"tests": ["f(1) == 2"]}
    returned(lambda response, row: row.clear(), prompt, "")
    assert ROW


def several(responses, answers, rows=None, num_tokens=(), limit=2):  # type: ignore[no-untyped-def]
    return [(response, answers, rows, num_tokens, limit) for response in responses]


@pytest.mark.parametrize(
    "function",
    [
        lambda: 0.0,
        lambda a, b, c: 0.0,
        lambda *texts: 0.0,
        lambda prompt, answer: 0.0,
        lambda response, level: 0.0,
        lambda responses, answer: [],
        lambda responses, answer="": [],
        lambda responses, level: [],
        lambda prompts, answers: [],
        lambda prompts, completions, **columns: [],
        max,
    ],
)
def test_signature_that_fits_no_call_is_refused(function: Callable[..., object]) -> None:
    with pytest.raises(TypeError, match=r"by the names prompt, response, .*, by prompts, responses, |has no signature"):
        plan(function)


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (1.0, "the reward function returned 1.0, which is not a list with a score for each response"),
        ({"a": 1}, "the reward function returned {'a': 1}, which is not a list with a score for each response"),
        ([1.0, 2.0], "the reward function returned 2 scores for 1 response"),
    ],
)
def test_results_that_are_not_one_for_each_are_an_error(value: object, what: str) -> None:
    assert called(lambda responses: value).score(some("8")) == [RewardFailure("error", what)]
    assert called(lambda responses: iter([0.5])).score(some("8")) == [0.5]


def test_asynchronous_calls_wait_at_the_same_time() -> None:
    """Each of 40 responses waits for all 40 to have begun, and no more than allowed begin."""
    begun: list[str] = []
    running = [0, 0]

    async def together(response: str) -> float:
        begun.append(response)
        while len(begun) < 40:
            await asyncio.sleep(0.001)
        return float(response)

    async def counted(response: str) -> float:
        running[0] += 1
        running[1] = max(running)
        await asyncio.sleep(0)
        running[0] -= 1
        return 1.0

    assert called(together, concurrency=40).score(some(*map(str, range(40)))) == list(map(float, range(40)))
    called(counted, concurrency=3).score(some(*"abcdefgh"))
    assert running == [0, 3]


SUM = Prompt(index=3, token_ids=(1,), text="1+1=", answer="2", source="sums/easy")
CHAT = Prompt(index=4, token_ids=(2,), text="Hello!", answer=None, source="chat")


def polite(response: str) -> float | None:
    return None if response == "?" else float(len(response)) / 7


def named(sources: Mapping[str, list[str]] | None = None, **others: Any) -> Any:
    functions = {"correct": correct, "form": form, "polite": polite, **others}
    return called(*functions.items(), sources=sources or {})


def scored(source: Any, prompt: Prompt, text: str) -> Any:
    (outcome,) = source.score([(prompt, Response(text, 1, "stop"))])
    return outcome


def test_one_function_leaves_a_response_out() -> None:
    def unasked(response: str) -> float:
        raise AssertionError("called after a function has left the response out")

    assert scored(named(zzz=unasked), SUM, "?") is None


@pytest.mark.parametrize(
    ("others", "what"),
    [
        ({"broken": lambda response: 1 / 0}, "the reward function 'broken' raised ZeroDivisionError: "),
        ({"broken": lambda response: "a"}, "the reward function 'broken' returned 'a', which is not a number"),
        ({"form_box": polite}, "the reward function 'form_box' gives a part 'form_box', which another gives too"),
        ({"group": lambda response: {"std_mean": 1}}, "part 'group_std_mean' is not named by letters, digits, _, or "),
    ],
)
def test_errors_name_the_function(others: dict[str, Callable[..., object]], what: str) -> None:
    outcome = scored(named(**others), SUM, "2")
    assert isinstance(outcome, RewardFailure)
    assert what in outcome.what


def test_sources_of_the_rows_are_those_of_the_settings() -> None:
    rewards = named(SOURCES)

    def problems(*rows: Prompt, held_out: tuple[Prompt, ...] = ()) -> list[str]:
        return source_problems(rewards, rows, held_out, key="data_source")

    assert problems(SUM, CHAT) == problems(SUM, held_out=(CHAT,)) == problems(held_out=(CHAT,)) == []
    assert source_problems(named(), [SUM], [], key="data_source") == []
    nameless, other = dataclasses.replace(SUM, source=""), dataclasses.replace(SUM, source="code")
    assert problems(nameless, nameless, other, CHAT) == [
        "rows have the sources '', 'code' in the column 'data_source' (data.source_key; '' where it is missing), which "
        "reward.sources has no entry for",
        "reward.sources has entries for sums/easy, which no row has as 'data_source'",
    ]
    assert problems(dataclasses.replace(SUM, answer=None), CHAT) == [
        "row 3 of the source 'sums/easy' has no answer, which a function of reward.sources takes; add one, or give "
        "that parameter a default"
    ]


def test_each_function_gives_the_component_of_its_name() -> None:
    """In alphabetical order; a function that names its own gives both names; those of the row's source are called."""
    components = scored(named(), SUM, "It is 2")
    assert components == {"correct": 1.0, "form_box": 0.25, "form_short": 1 - 7 / 8, "polite": 1.0}
    assert list(components) == sorted(components)
    of_sources = named(SOURCES)
    assert scored(of_sources, SUM, "2") == {"correct": 1.0, "form_box": 0.25, "form_short": 0.875}
    assert scored(of_sources, CHAT, "Hello!?") == {"polite": 1.0}
