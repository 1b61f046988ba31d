"""Prompts of each step from one list, in epochs or the easiest first, and random orders."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mega_rl.types import Metrics, Prompt

# Purposes of random orders, which keep their random numbers apart.
SPLIT, EPOCH, MINIBATCH, CURRICULUM, SUCCESS, STREAM = range(6)


def permutation(size: int, *, key: Sequence[int]) -> list[int]:
    """Return 0 .. size-1 in random order, a pure function of size and key (non-negative integers).

    The order is that of raw Philox numbers. NumPy promises never to change their stream (unlike that of its
    `Generator.permutation`), so a run resumed on another version continues in the same order.
    """
    numbers = np.random.Philox(np.random.SeedSequence(list(key))).random_raw(size)
    return np.argsort(numbers, kind="stable").tolist()


class StepOrder(ABC):
    """Batches of steps, cut one after the other from an endless order of prompts."""

    def __init__(self, *, batch_size: int, num_prompts: int) -> None:
        assert batch_size >= 1, f"batch_size={batch_size}"
        self._batch_size = batch_size
        self.num_prompts = num_prompts  # prompts of an epoch

    def batch(self, step: int) -> list[Prompt]:
        """Return the prompts of one step, counted from 0."""
        assert step >= 0, f"step={step}"
        return self.take(self.drawn_after(step), self._batch_size)

    def drawn_after(self, done: int) -> int:
        """Return the number of prompts in the batches of the first `done` steps."""
        return done * self._batch_size

    @abstractmethod
    def take(self, first: int, count: int) -> list[Prompt]:
        """Return `count` prompts from number `first` of the endless order on, counted from 0."""

    def numbers(self) -> dict[str, int]:
        """Return the order's numbers for a checkpoint, equal on all ranks; none for a pure function."""
        return {}

    def restore(self, numbers: Mapping[str, int]) -> None:  # noqa: B027
        """Resume from the `numbers` of a checkpoint, which may have none; called before the first `take`."""

    def waits(self) -> Metrics:
        """Return the seconds of waiting for a stream since the last call; empty for prompts in memory."""
        return {}

    def close(self) -> None:  # noqa: B027
        """End the order's work in the background."""

    def epochs(self, drawn: int) -> float:
        """Return the first draws as a number of epochs."""
        return drawn / self.num_prompts

    def metrics(self, drawn: int) -> Metrics:
        """Return the number of prompts drawn, and of epochs."""
        return {"data/prompts": float(drawn), "data/epochs": self.epochs(drawn)}


class PromptSampler(StepOrder):
    """The prompts of each step, a pure function of the arguments and the step: resuming needs no state.

    Steps run through epoch after epoch without a gap: a batch may hold the end of one epoch and the beginning of the
    next, and with fewer prompts than `batch_size` a prompt more than once. With `shuffle` each epoch has its own order,
    by the seed and `key`, further non-negative integers that keep samplers of one seed apart.
    """

    def __init__(
        self, prompts: Sequence[Prompt], *, batch_size: int, shuffle: bool, seed: int, key: Sequence[int] = ()
    ) -> None:
        assert prompts, "a sampler needs prompts"
        super().__init__(batch_size=batch_size, num_prompts=len(prompts))
        self._prompts, self._shuffle = prompts, shuffle
        self._seed, self._key = seed, tuple(key)
        self._order: tuple[int, list[int]] = (-1, [])  # the last epoch, and its order

    def take(self, first: int, count: int) -> list[Prompt]:
        return [self._prompts[self.position(number)] for number in range(first, first + count)]

    def position(self, number: int) -> int:
        """Return the place in the list of the prompts of a draw, counted from 0."""
        epoch, offset = divmod(number, len(self._prompts))
        if not self._shuffle:
            return offset
        if self._order[0] != epoch:
            self._order = (epoch, permutation(len(self._prompts), key=(self._seed, EPOCH, epoch, *self._key)))
        return self._order[1][offset]


@dataclass(frozen=True)
class Growth:
    """Share of the prompts to draw from: grows evenly from `start` to 1 after `draws`."""

    start: float  # above 0, below 1
    draws: int
    easy_is_high: bool = False

    def share(self, drawn: int) -> float:
        """Return the share of the prompts, the easiest, after some draws."""
        return self.start + (1.0 - self.start) * min(1.0, drawn / self.draws)


class CurriculumSampler(StepOrder):
    """The prompts of each step, the easiest first, a pure function of the arguments and the step.

    Draws come in blocks. A block is drawn at random, none of it twice, from the share that has been reached when it
    begins; prompts of equal difficulty are in the order of the data. When the share is all, epochs begin.
    """

    def __init__(
        self, prompts: Sequence[Prompt], growth: Growth, *, batch_size: int, seed: int, key: Sequence[int] = ()
    ) -> None:
        super().__init__(batch_size=batch_size, num_prompts=len(prompts))
        sign = -1.0 if growth.easy_is_high else 1.0
        self._by_difficulty = sorted(prompts, key=lambda prompt: sign * prompt.difficulty)
        self._growth = growth
        self._seed, self._key = seed, tuple(key)
        self._block_size = min(batch_size, self._pool_size(0))
        self._blocks = math.ceil(growth.draws / self._block_size)  # before the epochs
        self._after = PromptSampler(prompts, batch_size=batch_size, shuffle=True, seed=seed, key=key)
        self._block: tuple[int, list[int]] = (-1, [])  # the last block, and its prompts

    def take(self, first: int, count: int) -> list[Prompt]:
        return [self._prompt(number) for number in range(first, first + count)]

    def _prompt(self, number: int) -> Prompt:
        block, offset = divmod(number, self._block_size)
        if block >= self._blocks:
            return self._after.take(number - self._blocks * self._block_size, 1)[0]
        if self._block[0] != block:
            size = self._pool_size(block * self._block_size)
            self._block = (block, permutation(size, key=(self._seed, CURRICULUM, block, *self._key)))
        return self._by_difficulty[self._block[1][offset]]

    def _pool_size(self, drawn: int) -> int:
        return math.ceil(self._growth.share(drawn) * self.num_prompts)
