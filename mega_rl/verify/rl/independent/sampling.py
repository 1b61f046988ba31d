"""Dynamic sampling: which of the sampled groups a step trains on (DAPO, arXiv:2503.14476, section 3.2, eq. 11)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from mega_rl.verify.rl.independent.formulas import Formulas
from mega_rl.verify.rl.independent.records import LockstepSettings, ScoredSample, StepBatch

Group = list[ScoredSample]


def groups_of(samples: Sequence[ScoredSample]) -> list[Group]:
    """Return the samples of each prompt, in the order of the prompts."""
    prompts = sorted({sample.prompt for sample in samples})
    return [[sample for sample in samples if sample.prompt == prompt] for prompt in prompts]


def kept_groups(
    generations: Sequence[Sequence[ScoredSample]], settings: LockstepSettings, formulas: Formulas
) -> tuple[list[Group], int]:
    """Return the groups that a step trains on, in the order drawn, and the number of generations that they take.

    A step draws until it has enough groups whose rewards differ; the first of them count. When generations run out, the
    first groups of equal rewards fill it, as docs/algorithms.md has it.
    """
    drawn, good, needed = list[Group](), list[int](), 0
    while len(good) < settings.prompts_per_step and needed < settings.max_generations:
        for group in groups_of(generations[needed]) if needed < len(generations) else []:
            if formulas.differ([_compared(sample, settings) for sample in group]):
                good.append(len(drawn))
            drawn.append(group)
        needed += 1
    equal = [number for number in range(len(drawn)) if number not in good]
    return [drawn[number] for number in sorted((good + equal)[: settings.prompts_per_step])], needed


def wrong_groups(batch: StepBatch, settings: LockstepSettings, formulas: Formulas) -> int:
    """Return how many groups of a step are not those to train on, and by how many generations it drew otherwise."""
    kept, needed = kept_groups(batch.generations, settings, formulas)
    real = groups_of(batch.samples)
    wrong = sum(_content(mine) != _content(its) for mine, its in zip(kept, real, strict=False))
    return wrong + abs(len(kept) - len(real)) + abs(needed - len(batch.generations))


def wrong_prompts(batch: StepBatch, settings: LockstepSettings) -> int:
    """Return how many prompts of the step the mini-batches of an epoch do not have once, over all epochs."""
    prompts, count = Counter({sample.prompt for sample in batch.samples}), settings.updates_per_epoch
    epochs = [batch.minibatches[first : first + count] for first in range(0, len(batch.minibatches), count)]
    trained = [Counter(prompt for minibatch in epoch for prompt in minibatch) for epoch in epochs]
    return sum(((prompts - epoch) + (epoch - prompts)).total() for epoch in trained)


def _compared(sample: ScoredSample, settings: LockstepSettings) -> list[float]:
    """Return the numbers by which responses differ: of GDPO each part with a weight, else the reward as scored."""
    if settings.advantage.name != "gdpo":
        return [sample.reward]
    return [part for name, part in sample.parts.items() if settings.part_weights.get(name, 1.0)]


def _content(group: Group) -> list[tuple[object, ...]]:
    """Return the content of a group's samples, without the number of its prompt."""
    return [(*sample.tokens, sample.reward, *sample.rollout_logprobs, *sample.parts.values()) for sample in group]
