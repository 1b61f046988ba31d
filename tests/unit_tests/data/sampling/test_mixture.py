"""Prompts from several sources: shares of every prefix, epochs of each source, the same order from any step on."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping

import pytest

from mega_rl.data.sampling.mixture import (
    MAX_CYCLE,
    DrawOrder,
    MixtureSampler,
    OrderPlan,
    mixture_of,
    shares_of,
    weights_by_size,
)
from mega_rl.types import Prompt

WEIGHTS = {"math": 3.0, "code": 1.0, "chat": 0.5}
SIZES = {"math": 7, "code": 5, "chat": 11}


def prompts(sizes: Mapping[str, int] = SIZES) -> dict[str, list[Prompt]]:
    return {
        name: [Prompt(index, (1,), f"{name} {index}", "", source=name) for index in range(size)]
        for name, size in sizes.items()
    }


def sampler(*, shuffle: bool = True, seed: int = 0, batch_size: int = 4) -> MixtureSampler:
    return mixture_of(prompts(), WEIGHTS, OrderPlan(shuffle, seed), batch_size=batch_size)


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


def test_a_draw_is_known_without_those_before() -> None:
    order = DrawOrder([6, 2, 1])
    draws = [order.draw(number) for number in range(40)]
    assert [DrawOrder([6, 2, 1]).draw(number) for number in reversed(range(40))] == draws[::-1]
    far, cycles = 10**12 + 3, (10**12 + 3) // 9
    expected = [6 * cycles, 2 * cycles, cycles]
    assert [a + b for a, b in zip(expected, order.counts(far % 9), strict=True)] == DrawOrder([6, 2, 1]).counts(far)


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
    order = sampler(shuffle=shuffle)
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


def test_a_step_depends_on_its_number_alone() -> None:
    once = sampler()
    onwards = [once.batch(step) for step in range(12)]
    for step in range(12):
        assert sampler().batch(step) == onwards[step]
    assert sampler(batch_size=1).take(9, 7) == [*onwards[2], *onwards[3], *onwards[4]][1:8]
    assert sampler(seed=1).batch(0) != onwards[0]


def test_the_order_of_a_source_does_not_depend_on_the_others_names() -> None:
    """A name seeds its source, not its place: an earlier name beside it changes nothing."""
    sizes = {"math": 7, "a_new_one": 4}
    other = mixture_of(prompts(sizes), {"math": 1.0, "a_new_one": 1.0}, OrderPlan(True, 0), batch_size=1)
    first, second = (
        [prompt.index for prompt in order.take(0, 60) if prompt.source == "math"][:14] for order in (sampler(), other)
    )
    assert first == second


def test_sources_of_one_size_have_different_orders() -> None:
    alike = mixture_of(prompts({"a": 9, "b": 9}), {"a": 1, "b": 1}, OrderPlan(True, 0), batch_size=1)
    drawn = alike.take(0, 18)
    first, second = ([prompt.index for prompt in drawn if prompt.source == name] for name in ("a", "b"))
    assert sorted(first) == sorted(second)
    assert first != second


def changed(weights: Mapping[str, float], *, before: MixtureSampler) -> MixtureSampler:
    """The mixture with other weights, going on from a checkpoint of `before`."""
    sampler = mixture_of(prompts(), weights, OrderPlan(True, 0), batch_size=4)
    sampler.restore(before.numbers())
    return sampler


def test_other_weights_on_resume_take_each_source_on_in_its_epoch() -> None:
    old = sampler(batch_size=4)
    drawn = Counter(prompt.text for prompt in old.take(0, 40))
    new = changed({"math": 1.0, "code": 1.0, "chat": 6.0}, before=old)
    own = Counter(prompt.text for prompt in new.take(40, 80))
    for name, share in {"math": 10, "code": 10, "chat": 60}.items():
        counts = [drawn[f"{name} {index}"] + own[f"{name} {index}"] for index in range(SIZES[name])]
        assert sum(own[f"{name} {index}"] for index in range(SIZES[name])) == pytest.approx(share, abs=1)
        assert max(counts) - min(counts) <= 1  # no prompt is left out of an epoch, and none comes twice in one


def test_the_point_of_a_change_is_kept_by_later_checkpoints() -> None:
    """Counts are of both orders, and a third run goes on as the second does."""
    weights = {"math": 1.0, "code": 1.0, "chat": 6.0}
    second = changed(weights, before=sampler(batch_size=4))
    whole = second.take(40, 24)
    third = changed(weights, before=second)
    assert third.take(48, 16) == whole[8:]
    assert third.metrics(64) == second.metrics(64)
    assert sum(second.metrics(64)[f"data/{name}/prompts"] for name in SIZES) == 64
    assert second.metrics(40)["data/math/prompts"] == sampler(batch_size=4).metrics(40)["data/math/prompts"]


def test_equal_weights_on_resume_change_nothing() -> None:
    old = sampler(batch_size=4)
    same = changed(WEIGHTS, before=old)
    assert same.take(12, 20) == old.take(12, 20)
    blank = sampler(batch_size=4)
    blank.restore({})  # of a checkpoint of a version that kept no numbers
    assert blank.take(12, 20) == old.take(12, 20)
