"""Prompts of each step from one list, epoch after epoch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from mega_rl.data.ordering import EPOCH, permutation
from mega_rl.types import Metrics, Prompt


class StepOrder(ABC):
    """Batches of steps, cut one after the other from an endless order of prompts."""

    def __init__(self, *, batch_size: int, num_prompts: int) -> None:
        assert batch_size >= 1, f"batch_size={batch_size}"
        self._batch_size = batch_size
        self.num_prompts = num_prompts  # of an epoch

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
        """Return the numbers that a checkpoint keeps of the order, equal on all ranks; none of a pure function."""
        return {}

    def restore(self, numbers: Mapping[str, int]) -> None:  # noqa: B027
        """Go on from the `numbers` of a checkpoint; called before the first `take`, with none of one that has none."""

    def waits(self) -> Metrics:
        """Return the seconds that draws have waited for a stream since the last call; nothing of prompts in memory."""
        return {}

    def close(self) -> None:  # noqa: B027
        """End what the order does in the background."""

    def epochs(self, drawn: int) -> float:
        """Return how many epochs the first draws are."""
        return drawn / self.num_prompts

    def metrics(self, drawn: int) -> Metrics:
        """Return the number of prompts drawn, and how many epochs that is."""
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
        self._prompts = prompts
        self._shuffle = shuffle
        self._seed, self._key = seed, tuple(key)
        self._order: tuple[int, list[int]] = (-1, [])  # the epoch last asked for, and its order

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
