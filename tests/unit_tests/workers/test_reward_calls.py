"""Reward functions get the arguments that they ask for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from mega_rl.data.columns import RewardColumns
from mega_rl.types import Prompt
from mega_rl.workers.reward_calls import NoScoreError, Response, plan_call

ROW = {"question": "3+4=", "label": "7", "difficulty": 2}
PROMPT = Prompt(index=5, token_ids=(1,), text="3+4=", answer="7", messages=(("user", "3+4="),), row=ROW)
TEXTS = ("3+4=", "8", "7")


def everything(prompt, response, answer, row, messages, prompt_index, finish, num_tokens):  # type: ignore[no-untyped-def]
    return prompt, response, answer, row, messages, prompt_index, finish, num_tokens


def length_penalty(response: str, *, num_tokens: int, finish: str, limit: int = 2) -> Any:
    return num_tokens, finish, limit


def positional_and_facts(a, b, c, finish):  # type: ignore[no-untyped-def]
    return a, b, c, finish


def swapped(answer: str, response: str) -> Any:
    return answer, response


def keywords(*, response: str, row: dict[str, Any]) -> Any:
    return response, row


def other_names(question, completion, reference, row=None):  # type: ignore[no-untyped-def]
    return question, completion, reference, row


def settings(prompt, response, answer, scale=2.0, **rest):  # type: ignore[no-untyped-def]
    return prompt, response, answer, scale, rest


def called(function: Callable[..., object], prompt: Prompt, response: str) -> object:
    call = plan_call(function)
    return call(call.arguments(prompt, Response(response, num_tokens=3, finish="length")))


class Scorer:
    def __call__(self, prompt: str, response: str, answer: str) -> Any:
        return prompt, response, answer


@pytest.mark.parametrize(
    ("function", "returned"),
    [
        (everything, (*TEXTS, ROW, [{"role": "user", "content": "3+4="}], 5, "length", 3)),
        (length_penalty, (3, "length", 2)),
        (positional_and_facts, (*TEXTS, "length")),
        (swapped, ("7", "8")),
        (keywords, ("8", ROW)),
        (lambda response: response, "8"),
        (other_names, (*TEXTS, ROW)),
        (lambda a, b, c: (a, b, c), TEXTS),
        (lambda *texts: texts, TEXTS),
        (settings, (*TEXTS, 2.0, {})),
        (Scorer(), TEXTS),
        (partial(settings, scale=3.0), (*TEXTS, 3.0, {})),
    ],
)
def test_arguments(function: Callable[..., object], returned: object) -> None:
    assert called(function, PROMPT, "8") == returned


@pytest.mark.parametrize(
    ("function", "columns"),
    [
        (everything, RewardColumns(answer=True, structured=True, every=True)),
        (swapped, RewardColumns(answer=True, structured=False)),
        (keywords, RewardColumns(answer=False, structured=True, every=True)),
        (lambda response, answer="": 0.0, RewardColumns(answer=False, structured=True)),
        (lambda a, b, c: 0.0, RewardColumns(answer=True, structured=True)),
        (lambda a, b, c=None: 0.0, RewardColumns(answer=False, structured=True)),
        (lambda *texts: 0.0, RewardColumns(answer=True, structured=True)),
    ],
)
def test_columns_that_a_function_reads(function: Callable[..., object], columns: RewardColumns) -> None:
    assert plan_call(function).columns == columns


@pytest.mark.parametrize("function", [lambda response, answer="none": answer, lambda a, b, c="none": c])
def test_a_row_without_an_answer_leaves_the_default(function: Callable[..., object]) -> None:
    without = Prompt(index=0, token_ids=(1,), text="a", answer=None)
    assert called(function, without, "8") == "none"


def test_an_answer_is_handed_over_as_it_is_and_a_row_is_a_copy() -> None:
    prompt = Prompt(index=0, token_ids=(1,), text="a", answer={"tests": ["f(1) == 2"]}, row=ROW)
    assert called(lambda response, answer: answer, prompt, "") == {"tests": ["f(1) == 2"]}
    called(lambda response, row: row.clear(), prompt, "")
    assert ROW


@pytest.mark.parametrize(
    "function", [lambda: 0.0, lambda a, b: 0.0, lambda a, b, c, d: 0.0, lambda prompt, answer: 0.0]
)
def test_functions_that_cannot_be_called(function: Callable[..., object]) -> None:
    with pytest.raises(TypeError, match=r"has the signature .*, but is called as \(prompt, response, answer\)"):
        plan_call(function)


def several(responses, answers, rows=None, num_tokens=(), limit=2):  # type: ignore[no-untyped-def]
    return [(response, answers, rows, num_tokens, limit) for response in responses]


def test_a_function_of_several_gets_lists() -> None:
    call = plan_call(several)
    assert call.batched
    others = Prompt(index=6, token_ids=(1,), text="a", answer=None, row={"b": 1})
    batch = [
        call.arguments(prompt, Response(text, num_tokens=3, finish="stop"))
        for prompt, text in ((PROMPT, "8"), (others, "9"))
    ]
    assert batch[0] == {"response": "8", "answer": "7", "row": ROW, "num_tokens": 3}
    rest = (["7", None], [ROW, {"b": 1}], [3, 3], 2)
    assert call.together(batch) == [("8", *rest), ("9", *rest)]
    assert call.columns == RewardColumns(answer=True, structured=True, every=True)
    strings = plan_call(lambda responses, turns, transcripts: responses)
    assert strings.columns == RewardColumns(answer=False, structured=True)


def of_strings(responses: list[str], answers: list[str] = []) -> list[float]:  # noqa: B006
    return [0.0] * len(responses) * len(answers)


def test_columns_that_a_function_of_several_reads() -> None:
    assert plan_call(of_strings).columns == RewardColumns(answer=False, structured=False)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda responses, answer: [], r"several responses at a time by responses, and answer of one; name it answers"),
        (lambda prompt, responses, answers: [], r"and prompt of one; name it prompts"),
        (lambda responses, level: [], r"but level has no meaning; legal: prompts, responses, "),
        (lambda prompts, answers: [], r"by prompts, answers, but none of them is the responses; name a parameter resp"),
        (lambda prompts, completions, **columns: [], r"but completions is a parameter of TRL, .*Several responses"),
        (lambda completions, **columns: [], r"completions is a parameter of TRL"),
    ],
)  # fmt: skip
def test_functions_of_several_that_cannot_be_called(function: Callable[..., object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        plan_call(function)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (1.0, r"the reward function returned 1.0, which is not a list with a score for each response"),
        ({"a": 1}, r"which is not a list with"),
        ([1.0, 2.0], r"the reward function returned 2 scores for 1 response$"),
    ],
)
def test_results_that_are_not_one_for_each(value: object, message: str) -> None:
    call = plan_call(lambda responses: value)
    with pytest.raises(NoScoreError, match=message):
        call.evaluate({"response": "8"})
    assert plan_call(lambda responses: iter([0.5])).evaluate({"response": "8"}) == 0.5
