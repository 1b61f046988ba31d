"""Unchanged environments of verifiers play through the gateway, and their rubrics' rewards are the scores."""

from __future__ import annotations

import importlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from mega_rl.agents import gateway
from mega_rl.agents.environment import Answer, Played, Runner, TurnRequest, in_batches
from mega_rl.agents.trajectory import Trajectory, Turn
from mega_rl.agents.verifiers import Verifiers
from mega_rl.errors import UserError
from mega_rl.types import Prompt
from tests.helpers.chats import byte_tokenizer
from tests.peers.package import FOLDER, missing
from tests.unit_tests.agents.test_chat import CHATML, END, OTHER_END, context_of

ROWS = [{"question": f"{number} + 1?", "answer": str(number + 1)} for number in range(4)]


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Any:
    if reason := missing("verifiers"):
        pytest.skip(reason)
    monkeypatch.setattr(sys, "path", [*sys.path, str(FOLDER)])
    return importlib.import_module("verifiers")


def play(load: Callable[[], Any], *said: str, scores: bool = True, **own: Any) -> list[Played]:
    """Play each row once, over a policy that says these texts in turn."""

    class World(Verifiers):
        def load(self) -> Any:
            return load()

    tokenizer = byte_tokenizer(CHATML, eos=END, more=(OTHER_END,))
    environment = World(replace(context_of(tokenizer), reads_scores=scores), **own)
    prompts = []
    for row in Verifiers.rows(environment._world, "train"):
        ids = tuple(tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False))
        messages = tuple((one["role"], one["content"]) for one in row["prompt"])
        prompts.append(Prompt(len(prompts), ids, "", row["answer"], messages))
    turns, asked = [tuple(tokenizer(text + END)["input_ids"]) for text in said], Counter[int]()

    def sample(requests: Sequence[TurnRequest]) -> list[Answer]:
        answers = list[Answer]()
        for one in requests:
            ids = turns[asked[one.key[0]] % len(turns)][: one.limit]
            asked[one.key[0]] += 1
            answers.append(Turn(ids, (-0.5,) * len(ids), (), len(ids) == len(turns[0]) or ids[-1] == turns[0][-1]))
        return answers

    made = [Trajectory(one, one.index, 0, 2000) for one in prompts]
    outcomes = Runner(environment, "rollout.source='agent.py:World'", len(tokenizer)).run(
        made, partial(in_batches, sample=sample)
    )
    assert not gateway._servers
    return outcomes


def dataset() -> Any:
    return importlib.import_module("datasets").Dataset.from_list(ROWS)


def is_right(completion: Any, answer: str) -> float:
    """Reward the last message that is the answer."""
    return float(completion[-1]["content"] == answer)


def test_one_turn_is_scored_by_its_rubric(package: Any) -> None:
    def load() -> Any:
        return package.SingleTurnEnv(dataset=dataset(), rubric=package.Rubric(funcs=[is_right]), system_prompt="Add.")

    outcomes = play(load, "3")
    assert [one.failure for one in outcomes] == [None] * 4
    assert [one.trajectory.score for one in outcomes] == [0.0, 0.0, 1.0, 0.0]
    assert [len(one.trajectory.turns) for one in outcomes] == [1] * 4
    assert [one.trajectory.drifted for one in outcomes] == [0] * 4
    assert [one.trajectory.score for one in play(load, "3", scores=False)] == [None] * 4


def test_tools_of_an_environment_answer_between_turns(package: Any) -> None:
    def add(a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)

    def load() -> Any:
        return package.ToolEnv(dataset=dataset(), tools=[add], rubric=package.Rubric(funcs=[is_right]), max_turns=4)

    call = json.dumps({"name": "add", "arguments": {"a": 1, "b": 2}})
    outcomes = play(load, f"<tool_call>\n{call}\n</tool_call>", "3")
    assert [(one.failure, one.trajectory.score) for one in outcomes] == [(None, float(n == 2)) for n in range(4)]
    trajectory = outcomes[0].trajectory
    assert [isinstance(part, Turn) for part in trajectory.branch.parts] == [True, False, True]
    text = byte_tokenizer(CHATML, eos=END, more=(OTHER_END,)).decode(trajectory.branch.parts[1])
    assert text == "\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n"


def test_messages_of_an_environment_and_limits_end_a_trajectory(package: Any) -> None:
    class Again(package.MultiTurnEnv):  # type: ignore[misc, name-defined]
        async def env_response(self, messages: Any, state: Any, **given: Any) -> Any:
            return [{"role": "user", "content": "again"}]

    def load(most: int = 3) -> Any:
        return Again(dataset=dataset(), rubric=package.Rubric(funcs=[is_right]), max_turns=most)

    outcomes = play(load, "1")
    assert [(one.failure, len(one.trajectory.turns), one.trajectory.ended()) for one in outcomes] == [
        (None, 3, "done")
    ] * 4
    assert [one.trajectory.score for one in outcomes] == [1.0, 0.0, 0.0, 0.0]
    outcomes = play(lambda: load(9), "1", max_turns=2)
    assert [(one.failure, one.trajectory.ended(), one.trajectory.score) for one in outcomes[:2]] == [
        (None, "turns", 1.0), (None, "turns", 0.0)
    ]  # fmt: skip


def test_an_environment_that_fails_costs_its_samples(package: Any) -> None:
    class Broken(package.MultiTurnEnv):  # type: ignore[misc, name-defined]
        async def env_response(self, messages: Any, state: Any, **given: Any) -> Any:
            raise (package.Error if state["answer"] == "1" else KeyError)("no such world")

    outcomes = play(lambda: Broken(dataset=dataset(), rubric=package.Rubric(funcs=[is_right])), "1")
    assert [(one.failure, one.trajectory.end) for one in outcomes] == [("error", "error")] * 4
    assert "no such world" in outcomes[0].what
    assert "KeyError" in outcomes[1].what


def test_a_name_is_needed_and_the_package(monkeypatch: pytest.MonkeyPatch, package: Any) -> None:
    context = context_of(byte_tokenizer(CHATML, eos=END, more=(OTHER_END,)))
    with pytest.raises(UserError, match="name is empty; set it to an environment of verifiers"):
        Verifiers(context)
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(UserError, match=r"pip install 'mega_rl\[verifiers\]'"):
        Verifiers(context)
