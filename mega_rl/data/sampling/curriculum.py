"""Easy prompts first: draws from a growing share of the prompts, then epochs of all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mega_rl.data.ordering import CURRICULUM, permutation
from mega_rl.data.sampling.epochs import PromptSampler, StepOrder
from mega_rl.data.sampling.success import Preference, SuccessRates, SuccessSampler
from mega_rl.types import Prompt


@dataclass(frozen=True)
class Growth:
    """Growth of the share of prompts that are drawn from, even from `start` at the first draw to 1 after `draws`."""

    start: float  # above 0, below 1
    draws: int
    easy_is_high: bool = False

    def share(self, drawn: int) -> float:
        """Return the share of the prompts, the easiest, that a draw is from after so many."""
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
        self._block: tuple[int, list[int]] = (-1, [])  # the one last asked for, and its prompts

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


@dataclass(frozen=True)
class OrderPlan:
    """Order of one list of prompts: epochs, the easiest first, or by measured success."""

    shuffle: bool
    seed: int
    growth: Growth | None = None
    preference: Preference | None = None

    def order(
        self, prompts: Sequence[Prompt], rates: SuccessRates | None, *, batch_size: int, key: Sequence[int] = ()
    ) -> StepOrder:
        """Return the order of a list of prompts; rates: measured, where there is a preference."""
        if self.preference is not None and rates is not None:
            return SuccessSampler(prompts, rates, self.preference, batch_size=batch_size, seed=self.seed, key=key)
        if self.growth is not None:
            return CurriculumSampler(prompts, self.growth, batch_size=batch_size, seed=self.seed, key=key)
        return PromptSampler(prompts, batch_size=batch_size, shuffle=self.shuffle, seed=self.seed, key=key)

    def for_share(self, share: float) -> OrderPlan:
        """Return the plan of a source with a share of the draws."""
        growth = self.growth
        return self if growth is None else replace(self, growth=replace(growth, draws=math.ceil(share * growth.draws)))
