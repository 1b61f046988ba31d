"""Prompts preferred by measured success: weights by hand, shares, epochs beside them, the same order again."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from mega_rl.data.sampling.mixture import OrderPlan, mixture_of
from mega_rl.data.sampling.success import Preference, SuccessRates, SuccessSampler, draw_by_weight
from mega_rl.types import Prompt

PREFERENCE = Preference("learnable", explore=0.25)


def prompts(count: int = 12, *, first: int = 0, source: str = "") -> list[Prompt]:
    return [Prompt(3 * index + first, (1,), str(index), "", source=source) for index in range(count)]


def rates_of(own: list[Prompt], right: dict[int, float], *, n: int = 8, memory: float = 0.5) -> SuccessRates:
    """Rates with `n` samples of some prompts, by place."""
    rates = SuccessRates(own, memory=memory)
    visited = [own[place] for place in right]
    rates.record(visited, right=list(right.values()), samples=[n] * len(right))
    return rates


def sampler(own: list[Prompt], rates: SuccessRates, *, seed: int = 0, explore: float = 0.25) -> SuccessSampler:
    return SuccessSampler(own, rates, Preference("learnable", explore), batch_size=4, seed=seed)


def test_weights_are_those_of_the_papers() -> None:
    own = prompts(4)
    rates = rates_of(own, {0: 0, 1: 2, 2: 8})
    places = np.arange(4)
    assert rates.weights(places, "learnable") / (1 << 30) == pytest.approx([0, 0.25 * 0.75, 0, 1 / 6], abs=1e-8)
    assert rates.weights(places, "unsolved") / (1 << 30) == pytest.approx([1, 0.75, 0, 0.5], abs=1e-8)


@pytest.mark.parametrize(("memory", "rate"), [(0.5, (1 + 6) / (4 + 8)), (0.0, 6 / 8), (1.0, (2 + 6) / 16)])
def test_earlier_visits_count_less(memory: float, rate: float) -> None:
    own = prompts(2)
    rates = rates_of(own, {1: 2}, memory=memory)
    rates.record([own[1]], right=[6], samples=[8])
    assert rates.right[1] / rates.samples[1] == pytest.approx(rate)
    rates.record([own[1]], right=[0], samples=[0])  # all of its samples failed: no visit
    assert rates.right[1] / rates.samples[1] == pytest.approx(rate)


def test_a_prompt_twice_in_a_step_is_one_visit() -> None:
    own = prompts(2)
    rates = rates_of(own, {0: 4})
    rates.record([own[0], own[1], own[0]], right=[1, 0, 2], samples=[8, 8, 8])
    assert (rates.right.tolist(), rates.samples.tolist()) == ([2 + 3, 0], [4 + 16, 8])


def test_draws_follow_the_weights() -> None:
    weights = np.array([1, 2, 0, 5], dtype=np.int64)
    counts = Counter(draw_by_weight(weights, 1, taken=(), key=(7, number))[0] for number in range(4000))
    assert counts[2] == 0
    for place, share in ((0, 1 / 8), (1, 2 / 8), (3, 5 / 8)):
        assert counts[place] / 4000 == pytest.approx(share, abs=4 * (share * (1 - share) / 4000) ** 0.5)


def test_later_draws_follow_the_weights_that_are_left() -> None:
    """P(0 first, 1 second) = 1/4 * 1/3 with weights 1, 1, 2."""
    weights = np.array([1, 1, 2], dtype=np.int64)
    pairs = Counter(tuple(draw_by_weight(weights, 2, taken=(), key=(8, number))) for number in range(6000))
    assert pairs[0, 1] / 6000 == pytest.approx(1 / 12, abs=4 * (1 / 12 * 11 / 12 / 6000) ** 0.5)
    assert pairs[0, 2] / 6000 == pytest.approx(1 / 6, abs=4 * (1 / 6 * 5 / 6 / 6000) ** 0.5)
    assert not any(first == second for first, second in pairs)


def test_without_a_weight_left_the_others_are_drawn_and_then_all_again() -> None:
    weights = np.array([0, 3, 0, 0], dtype=np.int64)
    drawn = draw_by_weight(weights, 6, taken=(2,), key=(1,))
    assert drawn[0] == 1
    assert sorted(drawn[:3]) == [0, 1, 3]
    assert len(drawn) == 6


def test_learnable_prompts_come_more_often_and_the_others_by_epochs() -> None:
    own = prompts(40)
    rates = rates_of(own, {place: 4 if place < 10 else 8 for place in range(40)})
    order = sampler(own, rates)
    counts = Counter(prompt.text for step in range(40) for prompt in order.batch(step))  # 160 draws, 40 by epochs
    solved = [counts[str(place)] for place in range(10, 40)]
    assert solved == [1] * 30
    assert sum(counts[str(place)] for place in range(10)) == 130


def test_no_prompt_comes_twice_in_a_step() -> None:
    own = prompts(12)
    order = sampler(own, rates_of(own, {place: 4 for place in range(5)}))
    for step in range(30):
        batch = [prompt.index for prompt in order.batch(step)]
        assert len(set(batch)) == 4


def test_the_order_is_a_function_of_draws_and_rates() -> None:
    own = prompts(20)
    rates = rates_of(own, {place: place % 9 for place in range(15)})
    order, again = sampler(own, rates), sampler(own, rates)
    later = [order.batch(step) for step in range(5)][-1]
    assert again.batch(4) == later
    assert sampler(own, rates, seed=1).batch(4) != later
    rates.record(own, right=[0] * 10 + [4] * 10, samples=[8] * 20)
    assert again.batch(4) != later


def test_each_source_of_a_mixture_has_preferences_of_its_own() -> None:
    sources = {"a": prompts(12, source="a"), "b": prompts(12, first=100, source="b")}
    everyone = [*sources["a"], *sources["b"]]
    rates = rates_of(everyone, {place: 4 if place % 12 < 6 else 0 for place in range(24)})
    order = mixture_of(sources, {"a": 3, "b": 1}, OrderPlan(True, 0, None, PREFERENCE), batch_size=8, rates=rates)
    batches = [order.batch(step) for step in range(30)]
    assert all(Counter(prompt.source for prompt in batch) == {"a": 6, "b": 2} for batch in batches)
    learnable = sum(int(prompt.text) < 6 for batch in batches for prompt in batch) / 240
    assert learnable == pytest.approx(0.75 + 0.25 / 2, abs=0.06)  # those by weight, and half of those by epochs
    metrics = order.metrics(240)
    assert metrics["data/success_mean"] == metrics["data/a/success_mean"] == pytest.approx(0.25)
    assert metrics["data/unsolved_fraction"] == metrics["data/b/unsolved_fraction"] == 0.5


def test_metrics_say_what_is_measured() -> None:
    own = prompts(8)
    order = sampler(own, rates_of(own, {0: 0, 1: 8, 2: 8, 3: 4}))
    measured = {name: value for name, value in order.metrics(0).items() if "fraction" in name or "mean" in name}
    assert measured == {
        "data/success_mean": 20 / 32,
        "data/unseen_fraction": 0.5,
        "data/solved_fraction": 0.25,
        "data/unsolved_fraction": 0.125,
    }
    assert "data/success_mean" not in sampler(own, SuccessRates(own, memory=0.5)).metrics(0)
