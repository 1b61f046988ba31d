"""The reward role: what is scored, and that every rank hears of a failure."""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mega_rl.errors import UserError
from mega_rl.types import Prompt, Rewards, Rollout
from mega_rl.workers.reward import FunctionRewards, Outcomes, RewardWorker, ignore
from mega_rl.workers.reward_calls import TAKEN, NoScore, Response
from mega_rl.workers.scoring.failures import FailureRule, RewardError
from mega_rl.workers.scoring.parts import PartRule
from mega_rl.workers.scoring.responses import ResponseReader
from tests.helpers.threads import ThreadGroup

PROMPTS = [
    Prompt(index=17, token_ids=(1, 2), text="1+1=", answer="2"),
    Prompt(index=23, token_ids=(3,), text="2+3=", answer="5"),
]


def rollout_of() -> Rollout:
    """Three rows: prompt 1 (finished), prompt 0 (cut off by length), prompt 1 (only a stop token)."""
    tokens = torch.tensor([[3, 50, 51, 9, 0], [1, 2, 52, 53, 54], [3, 9, 0, 0, 0]])
    prompt_lengths = torch.tensor([1, 2, 1])
    lengths = torch.tensor([4, 5, 2])
    return Rollout.from_rows(
        tokens,
        prompt_lengths=prompt_lengths,
        lengths=lengths,
        finished=torch.tensor([True, False, True]),
        prompt_index=torch.tensor([1, 0, 1]),
        sample_index=torch.tensor([0, 0, 1]),
    )


def decode(token_ids: Sequence[int]) -> str:
    return ",".join(map(str, token_ids))


READER = ResponseReader(decode, stop_ids=(9,))


def score_on(size: int, function: Callable[..., object], *, replicas: int = 1) -> list[Tensor | RewardError]:
    """What `score` returns or raises on each rank of replicas of `size` ranks; each scores the same rows."""
    everyone = ThreadGroup(size * replicas)
    groups = [ThreadGroup(size) for _ in range(replicas)]
    results: list[Tensor | RewardError] = [torch.zeros(0)] * everyone.size

    def work(rank: int) -> None:
        replica = groups[rank // size].rank(rank % size)
        scorer = FunctionRewards(function)
        worker = RewardWorker(scorer, reader=READER, replica=replica, everyone=everyone.rank(rank), timeout_s=60)  # type: ignore[arg-type]
        try:
            results[rank] = worker.score(rollout_of(), PROMPTS).totals
        except RewardError as error:
            results[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(everyone.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_what_the_function_sees() -> None:
    calls = []

    def function(prompt: str, response: str, answer: str) -> float:
        calls.append((prompt, response, answer))
        return len(calls) / 2

    (scores,) = score_on(1, function)
    assert calls == [("2+3=", "50,51", "5"), ("1+1=", "52,53,54", "2"), ("2+3=", "", "5")]
    assert isinstance(scores, Tensor)
    assert scores.dtype == torch.float32
    assert scores.tolist() == [0.5, 1.0, 1.5]


def test_the_function_sees_how_responses_ended_and_their_tokens() -> None:
    """The stop token is counted as rollout/response_tokens_mean counts it, and is not in the text."""
    calls = []

    def function(response: str, finish: str, num_tokens: int) -> float:
        calls.append((response, finish, num_tokens))
        return 0.0

    score_on(1, function)
    assert calls == [("50,51", "stop", 3), ("52,53,54", "length", 3), ("", "stop", 1)]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ranks_share_the_responses_and_all_get_every_score(size: int) -> None:
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
    assert all(isinstance(result, Tensor) and result.tolist() == [5.0, 8.0, 0.0] for result in results)


@pytest.mark.parametrize("value", [1, True, torch.tensor(2.0).numpy()[()]], ids=["int", "bool", "numpy"])
def test_numbers_of_other_types(value: object) -> None:
    (scores,) = score_on(1, lambda *_: value)
    assert isinstance(scores, Tensor)
    assert scores.tolist() == [float(value)] * 3  # type: ignore[arg-type]


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
    ],
)
def test_what_is_no_score_is_an_error_on_every_rank(value: object, expected: str) -> None:
    results = score_on(2, lambda *_: value)
    assert all(isinstance(result, RewardError) for result in results)
    first, second = map(str, results)
    assert first == second
    assert expected in first
    assert "prompt 23: '2+3=', response: '50,51', answer: '5'" in first


def test_a_function_that_raises_is_an_error_on_every_rank() -> None:
    def function(prompt: str, response: str, answer: str) -> float:
        return 1.0 if prompt == "2+3=" else {}["é\ud800"]  # type: ignore[return-value]

    results = score_on(2, function)
    for result in results:
        assert isinstance(result, RewardError)
        assert "raised KeyError: 'é" in str(result)
        assert f"(at {__file__}:" in str(result)
        assert "prompt 17: '1+1='" in str(result)


class TextlessError(Exception):
    """An exception that cannot be shown."""

    def __str__(self) -> str:
        raise ValueError("no text")


class Nameless:
    """A value that cannot be shown."""

    def __repr__(self) -> str:
        raise ValueError("no repr")


def test_what_cannot_be_shown_names_its_response_still() -> None:
    def raising(response: str) -> float:
        raise TextlessError

    for function, said in (
        (raising, "raised TextlessError: "),
        (lambda response: Nameless(), "raised ValueError: no "),
    ):
        (error,) = score_on(1, function)
        assert isinstance(error, RewardError)
        assert f"the reward function {said}" in str(error)
        assert "prompt 23: '2+3='" in str(error)


def test_a_function_that_is_interrupted_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """By a second Ctrl-C or by itself: the run ends as one that was interrupted, and says where."""

    def function(response: str) -> float:
        raise KeyboardInterrupt

    prompt = Prompt(17, (1,), "1+1=", "2")
    with pytest.raises(KeyboardInterrupt):
        FunctionRewards(function).score_texts([(prompt, Response("7", 1, "stop"))])
    assert "the reward function was interrupted; prompt 17: '1+1=', response: '7'" in caplog.text


def test_a_failure_on_one_replica_is_an_error_on_all() -> None:
    """The other replicas would wait for it in the next collective until the deadline."""
    first = threading.Lock()

    def function(prompt: str, response: str, answer: str) -> float:
        return float("nan") if first.acquire(blocking=False) else 1.0

    results = score_on(2, function, replicas=2)
    assert all(isinstance(result, RewardError) and "returned nan" in str(result) for result in results)


def test_failed_samples_are_not_scored() -> None:
    """The function does not see them: an empty answer may be one it cannot take."""
    rollout = rollout_of()
    rollout.failed = torch.tensor([False, True, False])
    alone = ThreadGroup(1).rank(0)
    seen = []

    def function(prompt: str, response: str, answer: str) -> float:
        seen.append(prompt)
        return 7.0

    worker = RewardWorker(FunctionRewards(function), reader=READER, replica=alone, everyone=alone, timeout_s=60)  # type: ignore[arg-type]
    assert worker.score(rollout, PROMPTS).totals.tolist() == [7.0, 0.0, 7.0]
    assert seen == ["2+3=", "2+3="]


def test_no_rows() -> None:
    alone = ThreadGroup(1).rank(0)
    scorer = FunctionRewards(lambda *_: 1.0)
    worker = RewardWorker(scorer, reader=READER, replica=alone, everyone=alone, timeout_s=60)  # type: ignore[arg-type]
    assert worker.score(rollout_of()[:0], PROMPTS).totals.shape == (0,)


def scored_on(size: int, function: Callable[..., object], rule: PartRule) -> list[Rewards | Exception]:
    """What `score` returns or raises on each rank of one replica."""

    def work(ranks: Any) -> Rewards | Exception:
        own = dataclasses.replace(rule)
        worker = RewardWorker(
            FunctionRewards(function), reader=READER, replica=ranks, everyone=ranks, timeout_s=60, parts=own
        )
        try:
            return worker.score(rollout_of(), PROMPTS)
        except (RewardError, UserError) as error:
            return error

    return ThreadGroup(size).run(work)


def in_parts(response: str) -> dict[str, float]:
    return {"length": len(response), "first": float(response[:2] or 0) / 7, "shown": 0.5}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_named_parts_reach_every_rank_with_their_weighted_sum(size: int) -> None:
    """In alphabetical order, also on a rank without a response; the sum is one of float64, rounded once."""
    rule = PartRule({"length": -0.1, "shown": 0.0})
    for rewards in scored_on(size, in_parts, rule):
        assert isinstance(rewards, Rewards)
        assert rewards.parts is not None
        assert (rewards.parts.names, rewards.parts.weights) == (("first", "length", "shown"), (1.0, -0.1, 0.0))
        expected = [[50 / 7, 5.0, 0.5], [52 / 7, 8.0, 0.5], [0.0, 0.0, 0.5]]
        assert torch.equal(rewards.parts.values, torch.tensor(expected))
        assert torch.equal(rewards.totals, torch.tensor([50 / 7 - 0.5, 52 / 7 - 0.8, 0.0]))


SECOND = "; prompt 17: '1+1=', response: '52,53,54', answer: '2'"  # the cut off one, on the second of two ranks


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ({"a": 1.0}, "the reward {'a': 1.0} has no part 'b', which those of other responses have" + SECOND),
        ({"a": 1, "b": 2, "c": 3}, "has a part 'c', which those of other responses have not" + SECOND),
        (0.5, "the reward 0.5 has no part 'a', which those of other responses have" + SECOND),
        (
            {"a": 1.0, "b": float("nan")},
            "returned {'a': 1.0, 'b': nan}, whose part 'b' is not finite in float32" + SECOND,
        ),
        ({"a": 1.0, "b": None}, "returned {'a': 1.0, 'b': None}, whose part 'b' is not a number" + SECOND),
        ({"a": 1.0, "b": {"c": 1.0}}, "whose part 'b' is not a number" + SECOND),
        ({"a": 1.0, "b 2": 1.0}, "whose part 'b 2' is not named by letters, digits, _" + SECOND),
        ({"a": 1.0, "mean": 1.0}, "whose part 'mean' has the name of another metric; rename it" + SECOND),
        ({}, "returned {}, which has no part" + SECOND),
        ({"a": 3e38, "b": 3e38}, "the weighted sum of the parts {'a': 3e+38, 'b': 3e+38} is not finite in"),
    ],
)
@pytest.mark.parametrize("size", [1, 2])
def test_parts_that_are_not_those_of_the_others_are_an_error_on_every_rank(
    size: int, odd: object, message: str
) -> None:
    def function(response: str) -> object:
        return odd if response == "52,53,54" else {"a": 0.0, "b": 1.0}

    for error in scored_on(size, function, PartRule()):
        assert isinstance(error, RewardError)
        assert message in str(error)
        assert "prompt 17" in str(error)


@pytest.mark.parametrize(
    ("function", "rule", "message"),
    [
        (in_parts, PartRule({"lenght": 2.0}), "reward.weights.lenght has no effect: the reward has the parts first, l"),
        (len, PartRule({"length": 2.0}), "reward.weights.length has no effect: the reward is a number, without named"),
        (len, PartRule(reader="algorithm.advantage=gdpo"), "algorithm.advantage=gdpo reads named parts of the reward,"),
    ],
)
def test_settings_that_do_not_go_with_the_parts_are_refused_on_every_rank(
    function: Callable[..., object], rule: PartRule, message: str
) -> None:
    def scoring(response: str) -> object:
        return function(response)

    for error in scored_on(3, scoring, rule):
        assert isinstance(error, UserError)
        assert message in str(error)


def test_parts_stay_the_same_from_batch_to_batch() -> None:
    alone = ThreadGroup(1).rank(0)
    score: list[object] = [{"a": 1.0}]
    scorer = FunctionRewards(lambda *_: score[0])
    worker = RewardWorker(scorer, reader=READER, replica=alone, everyone=alone, timeout_s=60)  # type: ignore[arg-type]
    assert worker.score(rollout_of(), PROMPTS).parts is not None
    for other in ({"a": 1.0, "b": 2.0}, {"b": 1.0}, 1.0):
        score[0] = other
        with pytest.raises(RewardError, match=r"prompt 23: '2\+3='"):
            worker.score(rollout_of(), PROMPTS)


class HalfFailed(FunctionRewards):
    """The first response cannot be scored."""

    def score_texts(self, items: Sequence[tuple[Prompt, Response]], report: Any = None) -> Outcomes:
        return [NoScore("timeout", "too long"), *super().score_texts(items, ignore)[1:]]


def test_a_response_without_a_score_gets_the_failure_score_in_every_part() -> None:
    alone = ThreadGroup(1).rank(0)
    worker = RewardWorker(
        HalfFailed(in_parts),
        reader=READER,
        replica=alone,
        everyone=alone,
        timeout_s=60,
        parts=PartRule({"length": 0.5}),
        failed=FailureRule(-1.0, max_share=1.0),
    )  # type: ignore[arg-type]
    rewards = worker.score(rollout_of(), PROMPTS)
    assert rewards.parts is not None
    assert rewards.parts.values[0].tolist() == [-1.0, -1.0, -1.0]
    assert float(rewards.totals[0]) == -2.5


def test_what_a_reward_leaves_out_is_nan_on_every_rank() -> None:
    for result in score_on(2, lambda prompt, *_: None if prompt == "2+3=" else 1.0):
        assert isinstance(result, Tensor)
        assert str(result.tolist()) == "[nan, 1.0, nan]"


@pytest.mark.parametrize("max_share", [0.5, 0.1])
@pytest.mark.parametrize("score", [-1.0, None])
def test_an_exception_costs_one_response_its_reward(
    score: float | None, max_share: float, caplog: pytest.LogCaptureFixture
) -> None:
    """In the rank itself as in workers; what has other parts than the others has no score either."""

    def function(prompt: str, response: str) -> dict[str, float]:
        if prompt == "1+1=":
            raise SystemExit("enough")
        return {"a": 1.0}

    alone = ThreadGroup(1).rank(0)
    rule = FailureRule(score, max_share=max_share)
    for reward in (function, lambda prompt, response: {"b" if prompt == "1+1=" else "a": 1.0}):
        worker = RewardWorker(
            FunctionRewards(reward), reader=READER, replica=alone, everyone=alone, timeout_s=60, failed=rule
        )  # type: ignore[arg-type]
        if max_share < 1 / 3:
            with pytest.raises(RewardError, match=r"1 of 3 responses have no score: more than .* prompt 17: '1\+1='"):
                worker.score(rollout_of(), PROMPTS)
            continue
        totals = worker.score(rollout_of(), PROMPTS).totals.tolist()
        assert str(totals) == ("[1.0, nan, 1.0]" if score is None else "[1.0, -1.0, 1.0]")
        counts = {name: count for name, count in worker.metrics().items() if name.startswith("reward/")}
        assert counts == {"reward/timeouts": 0.0, "reward/crashes": 0.0, "reward/errors": 1.0}
    assert "raised SystemExit: enough" in caplog.text
    assert ("on_failure=mask" if score is None else "failure_score=-1") in caplog.text


def test_a_function_sees_the_token_ids() -> None:
    """Of the prompt, and of the response without the stop token that ended it."""
    calls: list[object] = []
    score_on(1, lambda token_ids, prompt_ids: calls.append((prompt_ids, token_ids)))
    assert calls == [([3], [50, 51]), ([1, 2], [52, 53, 54]), ([3], [])]


def test_no_part_can_have_the_name_of_another_metric() -> None:
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `reward/(\w+)`", page, re.M)) | {"overlong"} == set(TAKEN)


def of_several_turns(*, finished: bool) -> Rollout:
    """One row: two turns of the policy, between them and before the first what a tool wrote, stop tokens too.

    It is cut off where the answer to its last turn did not fit, which a stop token ended all the same.
    """
    rollout = Rollout.from_rows(
        torch.tensor([[3, 90, 50, 51, 9, 91, 9, 92, 52, 9, 0]]),
        prompt_lengths=torch.tensor([1]),
        lengths=torch.tensor([10]),
        loss_mask=torch.tensor([[False, False, True, True, True, False, False, False, True, True, False]]),
        finished=torch.tensor([finished]),
        prompt_index=torch.tensor([1]),
    )
    return rollout


@pytest.mark.parametrize("finished", [True, False])
def test_what_tools_wrote_is_no_response_of_the_policy(finished: bool) -> None:
    """A function sees the policy's own turns, one a line, and `transcript` is all of it, without stop tokens."""
    calls: list[tuple[object, ...]] = []

    def function(response: str, turns: list[str], transcript: str, num_tokens: int, finish: str) -> float:
        calls.append((response, turns, transcript, num_tokens, finish))
        return 1.0

    alone = ThreadGroup(1).rank(0)
    worker = RewardWorker(FunctionRewards(function), reader=READER, replica=alone, everyone=alone, timeout_s=60)  # type: ignore[arg-type]
    worker.score(of_several_turns(finished=finished), PROMPTS)
    finish = "stop" if finished else "length"
    assert calls == [("50,51\n52", ["50,51", "52"], "90,50,51,91,9,92,52", 5, finish)]
    assert READER.written(of_several_turns(finished=finished), 0) == ("50,51\n52", "90,50,51,91,9,92,52")


def test_neighbouring_turns_are_told_apart_by_their_stop_token() -> None:
    rollout = of_several_turns(finished=True)
    rollout.tokens = torch.tensor([[3, 50, 9, 51, 52, 9, 9, 53, 54, 9, 0]])
    rollout.loss_mask = torch.arange(11)[None] % 10 != 0
    ((_, response),) = READER.texts(rollout, [0], PROMPTS)
    assert (response.turns, response.num_tokens) == (("50", "51,52", "53,54"), 9)


def test_a_response_of_one_turn_is_its_only_turn() -> None:
    calls = []

    def function(turns: list[str], transcript: str, num_tokens: int) -> float:
        calls.append((turns, transcript, num_tokens))
        return 0.0

    score_on(1, function)
    assert calls == [(["50,51"], "50,51", 3), (["52,53,54"], "52,53,54", 3), ([""], "", 1)]
