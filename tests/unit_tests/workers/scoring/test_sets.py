"""Several reward functions: the parts that they give, which of them score a row, and whose failure it is."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mega_rl.data.columns import RewardColumns
from mega_rl.errors import UserError
from mega_rl.types import Prompt, Rewards
from mega_rl.workers.reward import FunctionRewards, RewardWorker
from mega_rl.workers.reward_calls import NoScore, NoScoreError, Response, plan_call
from mega_rl.workers.scoring.failures import FailureRule
from mega_rl.workers.scoring.parts import PartRule
from mega_rl.workers.scoring.sets import FunctionSet, load_call, source_problems
from tests.helpers.threads import ThreadGroup
from tests.unit_tests.workers.test_reward import PROMPTS, READER, rollout_of

SUM = Prompt(index=3, token_ids=(1,), text="1+1=", answer="2", source="sums/easy")
CHAT = Prompt(index=4, token_ids=(2,), text="Hello!", answer=None, source="chat")
SOURCES = {"sums/easy": ["correct", "form"], "chat": ["polite"]}


def correct(response: str, answer: str) -> float:
    return float(answer in response)


def form(prompt: str, response: str, answer: str) -> Mapping[str, float]:
    return {"short": 1.0 - len(response) / 8, "box": 0.25}


def polite(response: str) -> float | None:
    return None if response == "?" else float(len(response)) / 7


def functions(sources: Mapping[str, Sequence[str]] | None = None, **others: Callable[..., object]) -> FunctionSet:
    named = {"correct": correct, "form": form, "polite": polite, **others}
    return FunctionSet({name: plan_call(function) for name, function in named.items()}, sources or {})


def scored(of: FunctionSet, prompt: Prompt, text: str) -> Any:
    arguments = of.arguments(prompt, Response(text, 1, "stop"))
    return of.evaluate(json.loads(json.dumps(arguments)))


def test_each_function_gives_the_part_of_its_name() -> None:
    """In alphabetical order; parts of a function that names its own have both names."""
    parts = scored(functions(), SUM, "It is 2")
    assert parts == {"correct": 1.0, "form_box": 0.25, "form_short": 1 - 7 / 8, "polite": 1.0}
    assert list(parts) == sorted(parts)


def test_functions_of_a_source_alone_score_its_rows() -> None:
    of = functions(SOURCES)
    assert scored(of, SUM, "2") == {"correct": 1.0, "form_box": 0.25, "form_short": 0.875}
    assert scored(of, CHAT, "Hello!?") == {"polite": 1.0}
    assert of.arguments(CHAT, Response("x", 1, "stop")) == {"functions": ["polite"], "response": "x"}


def test_one_function_leaves_a_response_out() -> None:
    def unasked(response: str) -> float:
        raise AssertionError("called after a function has left the response out")

    assert scored(functions(zzz=unasked), SUM, "?") is None


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"broken": lambda response: 1 / 0}, r"the reward function 'broken' raised ZeroDivisionError: "),
        ({"broken": lambda response: "a"}, r"the reward function 'broken' returned 'a', which is not a number"),
        ({"form_box": polite}, r"the reward function 'form_box' gives a part 'form_box', which another gives too"),
        ({"group": lambda response: {"std_mean": 1}}, r"part 'group_std_mean' has the name of another metric"),
    ],
)
def test_errors_name_the_function(others: dict[str, Callable[..., object]], message: str) -> None:
    with pytest.raises(NoScoreError, match=message):
        scored(functions(**others), SUM, "2")
    (outcome,) = FunctionRewards(functions(**others)).score_texts([(SUM, Response("2", 1, "stop"))])
    assert isinstance(outcome, NoScore)


def test_columns_that_are_read() -> None:
    """An answer where the functions of every source need one, all columns where one reads them."""
    assert functions().columns == RewardColumns(answer=True, structured=False)
    assert functions(SOURCES).columns.answer is False
    assert functions(SOURCES | {"chat": ["polite", "form"]}).columns.answer is True
    assert functions(rows=lambda response, row: 0.0).columns.every


def problems(of: FunctionSet, *rows: Prompt, held_out: Sequence[Prompt] = ()) -> list[str]:
    return source_problems(of, rows, held_out, key="data_source")


def test_sources_of_the_rows_are_those_of_the_settings() -> None:
    of = functions(SOURCES)
    assert problems(of, SUM, CHAT) == problems(of, SUM, held_out=[CHAT]) == problems(functions(), SUM) == []
    nameless, other = dataclasses.replace(SUM, source=""), dataclasses.replace(SUM, source="code")
    assert problems(of, nameless, nameless, other, CHAT) == [
        "reward.sources goes by the column 'data_source', which 2 of 4 rows have not; name the column in "
        "data.source_key, or leave reward.sources out",
        "reward.sources has no entry for 'code', which rows have as 'data_source'; add which of reward.functions score "
        "them",
        "reward.sources has an entry for 'sums/easy', which no row has as 'data_source'; rows have 'chat', 'code'",
    ]
    assert source_problems(of, [], [CHAT], key="data_source") == []  # an evaluation
    assert problems(of, dataclasses.replace(SUM, answer=None), CHAT) == [
        "row 3 of the source 'sums/easy' has no answer, which a function of reward.sources takes; add one, or give "
        "that parameter a default"
    ]


MIXED = [dataclasses.replace(PROMPTS[0], source="chat"), dataclasses.replace(PROMPTS[1], source="sums/easy")]


def scored_on(size: int, of: FunctionSet, rule: PartRule, failed: FailureRule | None = None) -> list[Rewards]:
    """Return the rewards of a rollout of both sources, of the second of two steps, on each rank of one replica."""

    def work(ranks: Any) -> Rewards:
        worker = RewardWorker(
            FunctionRewards(of), reader=READER, replica=ranks, everyone=ranks, timeout_s=60,
            parts=dataclasses.replace(rule), failed=failed,
        )  # fmt: skip
        worker.score(rollout_of(), MIXED)
        return worker.score(rollout_of(), MIXED)

    return ThreadGroup(size).run(work)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_parts_that_a_source_does_not_have_are_nan_and_in_no_sum(size: int) -> None:
    """Rows 0 and 2 are sums, row 1 is chat; the same on every rank."""
    nan = math.nan
    expected = torch.tensor(
        [[1.0, 0.25, 1 - 5 / 8, nan], [nan, nan, nan, 8 / 7], [0.0, 0.25, 1.0, nan]], dtype=torch.float32
    )
    rule = PartRule({"form_short": 2.0, "polite": -1.0}, sources=tuple(SOURCES))
    for rewards in scored_on(size, functions(SOURCES), rule):
        assert rewards.parts is not None
        assert rewards.parts.names == ("correct", "form_box", "form_short", "polite")
        assert rewards.parts.weights == (1.0, 1.0, 2.0, -1.0)
        assert torch.equal(rewards.parts.values.nan_to_num(-9), expected.nan_to_num(-9))
        assert torch.equal(rewards.totals, torch.tensor([1.25 + 2 * (1 - 5 / 8), -8 / 7, 2.25]))


def test_one_source_is_no_source_bit_for_bit() -> None:
    everything = {source: ["correct", "form", "polite"] for source in SOURCES}
    (one,) = scored_on(1, functions(everything), PartRule({"form_short": 0.3}, sources=tuple(everything)))
    (none,) = scored_on(1, functions(), PartRule({"form_short": 0.3}))
    assert torch.equal(one.columns(), none.columns())
    assert one.parts is not None
    assert none.parts is not None
    assert one.parts.names == none.parts.names


def test_a_failed_response_gets_its_score_in_the_parts_of_its_source() -> None:
    def half(response: str) -> float:
        return 1.0 if response else 1 / 0

    of = functions({"sums/easy": ["half", "correct"], "chat": ["polite"]}, half=half)
    rule, failed = PartRule(sources=tuple(SOURCES)), FailureRule(-2.0, max_share=1.0)
    (rewards,) = scored_on(1, of, rule, failed)
    assert rewards.totals[2] == -4.0
    assert rewards.columns()[2].nan_to_num(9.0).tolist() == [-4.0, -2.0, -2.0, 9.0]


def test_some_functions_of_a_set_are_asynchronous() -> None:
    """The parts are those of the same functions that are not."""

    async def slowly(response: str, answer: str) -> float:
        await asyncio.sleep(0)
        return correct(response, answer)

    async def broken(response: str) -> float:
        raise ValueError(response)

    items = [(SUM, Response(text, 1, "stop")) for text in ("2", "12", "?", "3")]
    assert functions(correct=slowly).is_async
    assert not functions().is_async
    assert FunctionRewards(functions(correct=slowly)).score_texts(items) == FunctionRewards(functions()).score_texts(
        items
    )
    (outcome,) = FunctionRewards(functions(broken=broken)).score_texts(items[:1])
    assert isinstance(outcome, NoScore)
    assert outcome.what.startswith("the reward function 'broken' raised ValueError: 2")


def test_functions_of_several_responses_and_asynchronous_ones_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    file.write_text("def many(responses):\n    return []\n\nasync def later(response):\n    return 1.0\n")
    with pytest.raises(UserError, match=r"'a' takes several responses at a time and 'b' is asynchronous; of functions"):
        load_call({"a": f"{file}:many", "b": f"{file}:later"})
    assert load_call({"a": f"{file}:many", "c": "exact_match"}).batched
