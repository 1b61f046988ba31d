"""The independent trainer's choice of the groups that a step of dynamic sampling trains on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from mega_rl.verify.rl.independent.formulas import Formulas, kept_groups, wrong_groups, wrong_prompts
from mega_rl.verify.rl.independent.records import LockstepSettings, NamedSettings, ScoredSample, StepBatch
from mega_rl.verify.rl.inputs import algorithm_run
from mega_rl.verify.rl.rewards import ALGORITHMS, lockstep_settings

Rewards = Sequence[Sequence[float]]  # of the samples of each prompt
FORMULAS = Formulas()


def settings(*, prompts: int, generations: int) -> LockstepSettings:
    """Return the settings of a run that samples dynamically."""
    run = lockstep_settings(algorithm_run(ALGORITHMS["dapo_sampling"]).config)
    return replace(run, prompts_per_step=prompts, max_generations=generations)


def generation(first: int, rewards: Rewards) -> list[ScoredSample]:
    """Return samples of prompts, which are told apart by their first token; `first` is that of the first prompt."""
    return [
        ScoredSample([first + prompt, number], 1, prompt, reward, [-1.0])
        for prompt, group in enumerate(rewards)
        for number, reward in enumerate(group)
    ]


def step_of(generations: Sequence[list[ScoredSample]], tokens: Sequence[int]) -> StepBatch:
    """Return a step that trains on the prompts with these first tokens, numbered anew."""
    drawn = [sample for samples in generations for sample in samples]
    numbered = [
        replace(sample, prompt=list(tokens).index(sample.tokens[0])) for sample in drawn if sample.tokens[0] in tokens
    ]
    return StepBatch(numbered, [], generations)


GENERATIONS = [generation(10, [[1, 1], [0, 1], [1, 1]]), generation(20, [[0, 0], [1, 0], [0, 1]])]


@pytest.mark.parametrize(
    ("prompts", "most", "kept", "needed"),
    [
        (1, 2, [11], 1),  # one generation has enough
        (2, 2, [11, 21], 2),  # the first ones of those that differ
        (4, 2, [10, 11, 21, 22], 2),  # the first group of equal rewards fills the step
        (4, 5, [10, 11, 21, 22], 5),  # more had to be drawn
    ],
)
def test_first_differing_groups_are_kept(prompts: int, most: int, kept: list[int], needed: int) -> None:
    groups, generations = kept_groups(GENERATIONS, settings(prompts=prompts, generations=most), FORMULAS)
    assert [group[0].tokens[0] for group in groups] == kept
    assert generations == needed


@pytest.mark.parametrize(
    ("trained", "wrong"),
    [
        ([11, 21], 0),
        ([10, 11], 2),  # one of equal rewards was kept; the good one in its place moves on
        ([11, 22], 1),  # a good one was dropped
        ([21, 11], 2),  # another order
    ],
)
def test_a_step_of_other_groups_is_counted(trained: list[int], wrong: int) -> None:
    run = settings(prompts=2, generations=2)
    assert wrong_groups(step_of(GENERATIONS, trained), run, FORMULAS) == wrong


def test_a_generation_too_many_is_counted() -> None:
    batch = step_of([*GENERATIONS, generation(30, [[0, 0]])], [11, 21])
    assert wrong_groups(batch, settings(prompts=2, generations=3), FORMULAS) == 1


def test_gdpo_keeps_a_group_whose_weighted_parts_differ() -> None:
    """A part without weight makes no difference; equal sums of other parts are different rewards."""
    seen, swapped = generation(10, [[1, 1], [1, 1]])[:2], generation(10, [[1, 1], [1, 1]])[2:]
    samples = [
        *(replace(sample, parts={"a": 1.0, "b": 0.0, "seen": float(i)}) for i, sample in enumerate(seen)),
        *(replace(sample, parts={"a": 1.0 - i, "b": float(i), "seen": 0.0}) for i, sample in enumerate(swapped)),
    ]
    run = replace(settings(prompts=1, generations=1), advantage=NamedSettings("gdpo"), part_weights={"seen": 0.0})
    groups, _ = kept_groups([samples], run, FORMULAS)
    assert [group[0].prompt for group in groups] == [1]


@pytest.mark.parametrize(
    ("minibatches", "wrong"),
    [
        ([[0, 1], [2, 3]], 0),
        ([[0, 1], [2, 3], [1, 3], [0, 2]], 0),
        ([[0, 1], [1, 3]], 2),  # one twice, one never
        ([[0, 1], [2, 3], [0, 2], [1]], 1),
    ],
)
def test_minibatches_of_an_epoch_are_the_step(minibatches: list[list[int]], wrong: int) -> None:
    own = replace(settings(prompts=4, generations=0), updates_per_epoch=2)
    assert wrong_prompts(StepBatch(generation(10, [[0, 1]] * 4), minibatches), own) == wrong
