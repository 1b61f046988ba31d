"""Rewards that a lockstep computes from the tokens of a run, and how far the run's are from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest

from mega_rl.verify.rl.independent.records import ScoredSample, StepBatch
from mega_rl.verify.rl.inputs import EOS, SPECIAL, VOCABULARY, algorithm_run
from mega_rl.verify.rl.rewards import ALGORITHMS, RewardRule, rescored, reward_error, reward_rule

PAD = VOCABULARY.index(SPECIAL[0])
A, B, STOP = VOCABULARY.index("a"), VOCABULARY.index("b"), VOCABULARY.index("0")


def letters(prompt: str, response: str, answer: str) -> float:
    """Return a number that tells texts apart: each prompt's a is 100, a response's a is 1, b 10 and stop token 1000."""
    return 100 * prompt.count("a") + response.count("a") + 10 * response.count("b") + 1000 * response.count("0")


def by_letter(prompt: str, response: str, answer: str) -> Mapping[str, float]:
    return {"a": 0.1 * response.count("a"), "b": float(response.count("b"))}


LETTERS = RewardRule(letters, {}, frozenset({EOS, STOP}))


def sample(prompt: int, *response: int, reward: float = math.nan) -> ScoredSample:
    """Return a response to a prompt of one a for each number of it."""
    return ScoredSample([*[A] * (prompt + 1), *response], prompt + 1, prompt, reward, [-1.0] * len(response))


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ((A, B, EOS), 111.0),
        ((A, B, STOP), 111.0),  # a character that ends a response is not in its text
        ((A, STOP, PAD, B), 1111.0),  # cut off: the same character before the end is; special tokens are no text
    ],
)
def test_reward_ignores_the_stop_token(response: tuple[int, ...], expected: float) -> None:
    assert [one.reward for one in LETTERS.scored([sample(0, *response, reward=7.0)])] == [expected]


def test_parts_are_summed_by_weight_in_float32() -> None:
    rule = RewardRule(by_letter, {"a": 0.5}, frozenset({EOS}))
    (one,) = rule.scored([sample(0, A, B, B, EOS)])
    assert one.reward == pytest.approx(2.05, abs=1e-6)
    assert one.parts["b"] == 2.0
    assert one.parts["a"] != 0.1
    assert one.parts["a"] == pytest.approx(0.1, abs=1e-8)


def test_samples_get_their_prompts_greedy_reward() -> None:
    batch = StepBatch([sample(1, B), sample(0, A), sample(1, A)], [], greedy=[sample(1, A, A), sample(0, B, B)])
    own = rescored(batch, LETTERS)
    assert [one.reward for one in own.samples] == [210.0, 101.0, 201.0]
    assert [one.greedy_reward for one in own.samples] == [202.0, 120.0, 202.0]
    assert all(math.isnan(one.greedy_reward) for one in rescored(replace(batch, greedy=()), LETTERS).samples)


@pytest.mark.parametrize("place", ["samples", "generations", "greedy"])
def test_a_wrong_reward_is_seen_wherever_it_is(place: str) -> None:
    rows = [sample(0, A), sample(1, B)]
    right = rescored(StepBatch(rows, [], [rows], rows), LETTERS)
    assert reward_error(right, rescored(right, LETTERS)) == 0.0
    swapped = replace(LETTERS, placed=lambda samples: list(samples)[::-1]).scored(rows)
    wrong = {"samples": swapped, "generations": [swapped], "greedy": swapped}
    assert reward_error(replace(right, **{place: wrong[place]}), right) == 109.0  # 210 against 101


def test_other_part_names_are_infinitely_far() -> None:
    own = StepBatch(LETTERS.scored([sample(0, A)]), [])
    parts = replace(own.samples[0], parts={"a": 1.0})
    assert reward_error(replace(own, samples=[parts]), own) == math.inf
    assert reward_error(replace(own, samples=[sample(0, A)]), own) == math.inf  # not a number


def test_a_run_without_a_reward_has_none() -> None:
    rule = reward_rule(algorithm_run(ALGORITHMS["teacher_jensen_shannon"]).config)
    assert rule.function is None
    assert math.isnan(rule.scored([sample(0, A, reward=1.0)])[0].reward)
