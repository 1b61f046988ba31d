"""Easy prompts first: what each draw is from, without repeats in a block, the same from any step on, then epochs."""

from __future__ import annotations

import math

import pytest

from mega_rl.data.sampling.epochs import CurriculumSampler, Growth, PromptSampler
from mega_rl.data.sampling.mixture import OrderPlan, mixture_of
from mega_rl.types import Prompt

SIZE, BATCH = 40, 5
GROWTH = Growth(start=0.25, draws=100)


def prompts(size: int = SIZE, source: str = "") -> list[Prompt]:
    """The hardest first, in pairs of equal difficulty."""
    return [Prompt(n, (1,), str(n), "", difficulty=float((size - 1 - n) // 2), source=source) for n in range(size)]


def sampler(growth: Growth = GROWTH, *, seed: int = 0, batch_size: int = BATCH) -> CurriculumSampler:
    return CurriculumSampler(prompts(), growth, batch_size=batch_size, seed=seed)


@pytest.mark.parametrize("easy_is_high", [False, True])
def test_draws_are_from_the_easiest_share(easy_is_high: bool) -> None:
    order = sampler(Growth(0.25, 100, easy_is_high=easy_is_high))
    ranks = {n: SIZE - 1 - n if not easy_is_high else n for n in range(SIZE)}  # 0 is the easiest, up to its pair
    seen: set[int] = set()
    for step in range(20):
        pool = math.ceil(SIZE * (0.25 + 0.75 * step * BATCH / 100))
        drawn = [prompt.index for prompt in order.batch(step)]
        assert len(set(drawn)) == BATCH
        assert all(ranks[index] <= pool for index in drawn)  # with the other one of the last pair
        seen |= set(drawn)
        if step == 3:
            assert len(seen) <= 16
    assert len(seen) > 25


def test_epochs_of_all_prompts_follow() -> None:
    order = sampler()
    later = [prompt.index for prompt in order.take(100, 2 * SIZE)]
    assert sorted(later[:SIZE]) == sorted(later[SIZE:]) == list(range(SIZE))
    plain = PromptSampler(prompts(), batch_size=BATCH, shuffle=True, seed=0)
    assert order.take(100, 60) == plain.take(0, 60)


def test_a_step_depends_on_its_number_alone() -> None:
    once = sampler()
    onwards = [once.batch(step) for step in range(30)]
    for step in range(30):
        assert sampler().batch(step) == onwards[step]
    assert sampler().take(7, 100) == [prompt for batch in onwards for prompt in batch][7:107]
    assert sampler(seed=1).batch(0) != onwards[0]


def test_a_batch_above_the_first_share_repeats_no_more_than_it_must() -> None:
    order = sampler(Growth(0.05, 40), batch_size=8)  # begins with two prompts
    assert sorted(prompt.index for prompt in order.take(0, 2)) == [38, 39]
    assert {prompt.index for prompt in order.take(40, SIZE)} == set(range(SIZE))


def test_each_source_of_a_mixture_begins_with_its_easiest() -> None:
    sources = {"a": prompts(40, "a"), "b": prompts(20, "b")}
    order = mixture_of(sources, {"a": 3, "b": 1}, OrderPlan(True, 0, Growth(0.25, 160)), batch_size=8)
    first = order.batch(0)
    assert all(prompt.difficulty < (5 if prompt.source == "a" else 3) for prompt in first)
    after = order.take(160, 160)
    for name, size in {"a": 40, "b": 20}.items():
        assert {prompt.index for prompt in after if prompt.source == name} == set(range(size))
