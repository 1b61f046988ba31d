"""Orders of prompts: by measured success, mixtures; each a function of draws, with epochs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from mega_rl.config.schema import DataConfig, SuccessCurriculum, TrainerConfig
from mega_rl.config.schema.data import MixtureConfig
from mega_rl.data.build import build_order
from mega_rl.data.order import (
    MAX_CYCLE,
    DrawOrder,
    MixtureSampler,
    SuccessRates,
    SuccessSampler,
    draw_by_weight,
    shares_of,
    weights_by_size,
)
from mega_rl.types import Prompt

WEIGHTS = {"math": 3.0, "code": 1.0, "chat": 0.5}
SIZES = {"math": 7, "code": 5, "chat": 11}


def mixture_of(
    prompts: Mapping[str, Sequence[Prompt]],
    weights: Mapping[str, float],
    *,
    batch_size: int,
    seed: int = 0,
    **data: Any,
) -> tuple[MixtureSampler, SuccessRates | None]:
    """Return the order that a run draws from lists of prompts."""
    sources = {name: {"files": [f"{name}.jsonl"], "weight": weight} for name, weight in weights.items()}
    config = DataConfig(mixture=MixtureConfig(sources=sources), **data)
    trainer = TrainerConfig(prompts_per_step=batch_size, seed=seed)
    order, rates = build_order(config, trainer, [prompt for own in prompts.values() for prompt in own])
    assert isinstance(order, MixtureSampler)
    return order, rates


def by_source(sizes: Mapping[str, int] = SIZES) -> dict[str, list[Prompt]]:
    return {
        name: [Prompt(index, (1,), f"{name} {index}", "", source=name) for index in range(size)]
        for name, size in sizes.items()
    }


def mixed(*, shuffle: bool = True, seed: int = 0, batch_size: int = 4) -> MixtureSampler:
    return mixture_of(by_source(), WEIGHTS, shuffle=shuffle, seed=seed, batch_size=batch_size)[0]


@pytest.mark.parametrize("trial", range(40))
def test_every_prefix_has_each_source_in_its_share(trial: int) -> None:
    """Tijdeman's bound, 1 - 1/(2k - 2) prompts; over a second cycle, too."""
    rng = random.Random(trial)
    shares = [rng.choice([1, 2, rng.randint(1, 40)]) for _ in range(rng.randint(1, 7))]
    order, counts = DrawOrder(shares), [0] * len(shares)
    bound = 1 - 1 / (2 * len(shares) - 2) if len(shares) > 1 else 0.0
    for number in range(1, 2 * sum(shares) + 1):
        source, before = order.draw(number - 1)
        assert before == counts[source]
        counts[source] += 1
        for count, share in zip(counts, shares, strict=True):
            assert abs(count - number * share / sum(shares)) <= bound + 1e-9
        assert order.counts(number) == counts


def test_shares_are_the_weights_as_they_are_written() -> None:
    assert shares_of(WEIGHTS) == {"math": 6, "code": 2, "chat": 1}
    assert shares_of({"a": 0.1, "b": 0.2, "c": 0.7}) == {"a": 1, "b": 2, "c": 7}
    assert shares_of({"a": 5.0}) == {"a": 1}
    fine = shares_of({"a": 1e-9, "b": 1 / 3, "c": 2 / 3})
    assert sum(fine.values()) == MAX_CYCLE
    assert fine == pytest.approx({"a": 1, "b": MAX_CYCLE / 3, "c": 2 * MAX_CYCLE / 3}, abs=1.0)


def test_a_temperature_goes_from_all_prompts_alike_to_all_sources_alike() -> None:
    sizes = {"large": 8000, "small": 80}
    assert shares_of(weights_by_size(sizes, 1.0)) == {"large": 100, "small": 1}
    square_root = weights_by_size(sizes, 2.0)
    assert square_root["large"] / square_root["small"] == pytest.approx(10.0)
    even = weights_by_size(sizes, 1e9)
    assert even["large"] / even["small"] == pytest.approx(1.0)
    assert shares_of(weights_by_size({"a": 10**12, "b": 1}, 0.01))["b"] == 1  # no overflow


@pytest.mark.parametrize("shuffle", [True, False])
def test_each_source_has_epochs_of_its_own(shuffle: bool) -> None:
    order = mixed(shuffle=shuffle)
    drawn = order.take(0, 9 * 60)
    assert Counter(prompt.source for prompt in drawn) == {"math": 360, "code": 120, "chat": 60}
    for name, size in SIZES.items():
        own = [prompt.index for prompt in drawn if prompt.source == name]
        epochs = [own[first : first + size] for first in range(0, len(own) - size + 1, size)]
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
        assert (len({tuple(epoch) for epoch in epochs}) > 1) == shuffle
    metrics = order.metrics(9 * 60)
    assert metrics["data/epochs"] == 540 / 23
    assert metrics["data/math/epochs"] == 360 / 7
    assert metrics["data/code/prompts"] == 120.0


def plain_prompts(count: int = 12, *, first: int = 0, source: str = "") -> list[Prompt]:
    return [Prompt(3 * index + first, (1,), str(index), "", source=source) for index in range(count)]


def rates_of(own: list[Prompt], right: dict[int, float], *, n: int = 8, memory: float = 0.5) -> SuccessRates:
    """Rates with `n` samples of some prompts, by place."""
    rates = SuccessRates(own, memory=memory)
    visited = [own[place] for place in right]
    rates.record(visited, right=list(right.values()), samples=[n] * len(right))
    return rates


def preferring(own: list[Prompt], rates: SuccessRates, *, seed: int = 0, explore: float = 0.25) -> SuccessSampler:
    return SuccessSampler(own, rates, rule="learnable", explore=explore, batch_size=4, seed=seed)


def test_weights_are_those_of_the_papers() -> None:
    own = plain_prompts(4)
    rates = rates_of(own, {0: 0, 1: 2, 2: 8})
    places = np.arange(4)
    assert rates.weights(places, "learnable") / (1 << 30) == pytest.approx([0, 0.25 * 0.75, 0, 1 / 6], abs=1e-8)
    assert rates.weights(places, "unsolved") / (1 << 30) == pytest.approx([1, 0.75, 0, 0.5], abs=1e-8)


@pytest.mark.parametrize(("memory", "rate"), [(0.5, (1 + 6) / (4 + 8)), (0.0, 6 / 8), (1.0, (2 + 6) / 16)])
def test_earlier_visits_count_less(memory: float, rate: float) -> None:
    own = plain_prompts(2)
    rates = rates_of(own, {1: 2}, memory=memory)
    rates.record([own[1]], right=[6], samples=[8])
    assert rates.right[1] / rates.samples[1] == pytest.approx(rate)
    rates.record([own[1]], right=[0], samples=[0])  # all of its samples failed: no visit
    assert rates.right[1] / rates.samples[1] == pytest.approx(rate)


def test_later_draws_follow_the_weights_that_are_left() -> None:
    """P(0 first, 1 second) = 1/4 * 1/3 with weights 1, 1, 2."""
    weights = np.array([1, 1, 2], dtype=np.int64)
    pairs = Counter(tuple(draw_by_weight(weights, 2, taken=(), key=(8, number))) for number in range(6000))
    assert pairs[0, 1] / 6000 == pytest.approx(1 / 12, abs=4 * (1 / 12 * 11 / 12 / 6000) ** 0.5)
    assert pairs[0, 2] / 6000 == pytest.approx(1 / 6, abs=4 * (1 / 6 * 5 / 6 / 6000) ** 0.5)
    assert not any(first == second for first, second in pairs)


def test_without_a_weight_left_the_others_are_drawn_and_then_all_again() -> None:
    weights = np.array([0, 3, 5, 0], dtype=np.int64)
    drawn = draw_by_weight(weights, 6, taken=(2,), key=(1,))
    assert drawn[0] == 1
    assert sorted(drawn[:3]) == [0, 1, 3]
    assert len(drawn) == 6


def test_learnable_prompts_come_more_often_and_the_others_by_epochs() -> None:
    own = plain_prompts(40)
    rates = rates_of(own, {place: 4 if place < 10 else 8 for place in range(40)})
    order = preferring(own, rates)
    counts = Counter(prompt.text for step in range(40) for prompt in order.batch(step))  # 160 draws, 40 by epochs
    solved = [counts[str(place)] for place in range(10, 40)]
    assert solved == [1] * 30
    assert sum(counts[str(place)] for place in range(10)) == 130


def test_the_order_is_a_function_of_draws_and_rates() -> None:
    own = plain_prompts(20)
    rates = rates_of(own, {place: place % 9 for place in range(15)})
    order, again = preferring(own, rates), preferring(own, rates)
    later = [order.batch(step) for step in range(5)][-1]
    assert again.batch(4) == later
    assert preferring(own, rates, seed=1).batch(4) != later
    rates.record(own, right=[0] * 10 + [4] * 10, samples=[8] * 20)
    assert again.batch(4) != later


def test_each_source_of_a_mixture_has_preferences_of_its_own() -> None:
    sources = {"a": plain_prompts(12, source="a"), "b": plain_prompts(12, first=100, source="b")}
    everyone = [*sources["a"], *sources["b"]]
    order, rates = mixture_of(sources, {"a": 3, "b": 1}, batch_size=8, curriculum=SuccessCurriculum())
    assert rates is not None
    right = [4 if place % 12 < 6 else 0 for place in range(24)]
    rates.record(everyone, right=right, samples=[8] * 24)
    batches = [order.batch(step) for step in range(30)]
    assert all(Counter(prompt.source for prompt in batch) == {"a": 6, "b": 2} for batch in batches)
    learnable = sum(int(prompt.text) < 6 for batch in batches for prompt in batch) / 240
    assert learnable == pytest.approx(0.75 + 0.25 / 2, abs=0.06)  # those by weight, and half of those by epochs
    metrics = order.metrics(240)
    assert metrics["data/success_mean"] == metrics["data/a/success_mean"] == pytest.approx(0.25)
    assert metrics["data/unsolved_fraction"] == metrics["data/b/unsolved_fraction"] == 0.5


def test_metrics_say_what_is_measured() -> None:
    own = plain_prompts(8)
    order = preferring(own, rates_of(own, {0: 0, 1: 8, 2: 8, 3: 4}))
    measured = {name: value for name, value in order.metrics(0).items() if "fraction" in name or "mean" in name}
    assert measured == {
        "data/success_mean": 20 / 32,
        "data/unseen_fraction": 0.5,
        "data/solved_fraction": 0.25,
        "data/unsolved_fraction": 0.125,
    }
    assert "data/success_mean" not in preferring(own, SuccessRates(own, memory=0.5)).metrics(0)
