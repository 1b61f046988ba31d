"""Prompts of each step: in epochs, by measured success, or mixed of several sources.

Rules of preference, of a prompt whose samples are right with probability p:

    learnable   p (1 - p)   Foster et al. 2025, arXiv:2502.12272: the policy gradient grows with the variance of success
    unsolved    1 - p       Kimi Team 2025 (Kimi k1.5), arXiv:2501.12599, prioritized sampling

An order is a function of the seed, the number of earlier draws and the measured rates, which a checkpoint keeps.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from mega_rl.errors import UserError
from mega_rl.types import Metrics, Prompt

# Purposes of random orders, which keep their random numbers apart.
SPLIT, EPOCH, MINIBATCH, SUCCESS, STREAM = 0, 1, 2, 4, 5
MAX_CYCLE = 1_000_000  # draws after which the order of sources begins again; finer shares are rounded to it
_LEAST = 1e-12  # least weight next to the largest; a temperature near 0 would round it to nothing
_LATE_SCALE = 1 << 64
_Floats: TypeAlias = npt.NDArray[np.float64]
_Integers: TypeAlias = npt.NDArray[np.int64]
_WEIGHT_SCALE = 1 << 30  # makes weights whole numbers, whose sums are exact on every machine
# Rule -> (weight of a success rate, weight of a prompt without samples: the mean over all rates).
PREFERENCES: Mapping[str, tuple[Callable[[_Floats], _Floats], float]] = {
    "learnable": (lambda rate: rate * (1.0 - rate), 1.0 / 6.0),
    "unsolved": (lambda rate: 1.0 - rate, 0.5),
}


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

    def prompt_of(self, number: int, row: int) -> Prompt:
        """Return the prompt of an earlier draw, which was the `row` of the data."""
        return self.take(number, 1)[0]

    def numbers(self) -> dict[str, int]:
        """Return the order's numbers for a checkpoint, equal on all ranks; none for a pure function."""
        return {}

    def restore(self, numbers: Mapping[str, int]) -> None:  # noqa: B027
        """Resume from the `numbers` of a checkpoint, which may have none; called before the first `take`."""

    def waits(self) -> Metrics:
        """Return the seconds of waiting for a stream since the last call; empty without one."""
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
    """The prompts of each step, a pure function of the arguments and the step."""

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


class SuccessRates:
    """Success of every training prompt in its samples so far, the same on all ranks."""

    def __init__(self, prompts: Sequence[Prompt], *, memory: float) -> None:
        """prompts: ascending by `Prompt.index`. memory: weight of earlier samples at a new visit, 0 to 1."""
        self._rows: _Integers = np.array([prompt.index for prompt in prompts], dtype=np.int64)
        assert (np.diff(self._rows) > 0).all(), "prompts are not in the order of their rows"
        self._memory = memory
        self.right: _Floats = np.zeros(len(prompts))  # samples that were right, earlier visits by their weight
        self.samples: _Floats = np.zeros(len(prompts))

    def places(self, prompts: Sequence[Prompt]) -> _Integers:
        """Return [n] the places of prompts in `right` and `samples`."""
        rows = np.array([prompt.index for prompt in prompts], dtype=np.int64)
        return np.searchsorted(self._rows, rows)

    def record(self, prompts: Sequence[Prompt], *, right: Sequence[float], samples: Sequence[float]) -> None:
        """Add the right samples and all samples of a visit; 0 of 0 is none."""
        own, places = np.unique(self.places(prompts), return_inverse=True)
        new = np.zeros((2, len(own)))
        np.add.at(new[0], places, np.asarray(right, dtype=np.float64))
        np.add.at(new[1], places, np.asarray(samples, dtype=np.float64))
        visited = new[1] > 0
        own, new = own[visited], new[:, visited]
        self.right[own] = self._memory * self.right[own] + new[0]
        self.samples[own] = self._memory * self.samples[own] + new[1]

    def weights(self, places: _Integers, rule: str) -> _Integers:
        """Return [n] int64, the weights of prompts by a rule."""
        of_rate, unseen = PREFERENCES[rule]
        right, samples = self.right[places], self.samples[places]
        weights = np.where(samples > 0, of_rate(right / np.maximum(samples, 1e-300)), unseen)
        return np.floor(weights * _WEIGHT_SCALE).astype(np.int64)

    def metrics(self, places: _Integers | None = None) -> Metrics:
        """Return the mean success rate, and the shares of unseen, solved and unsolved prompts."""
        places = np.arange(len(self._rows)) if places is None else places
        right, samples = self.right[places], self.samples[places]
        seen = samples > 0
        metrics = {
            "data/unseen_fraction": float((~seen).mean()),
            "data/solved_fraction": float((seen & (right == samples)).mean()),
            "data/unsolved_fraction": float((seen & (right == 0)).mean()),
        }
        if seen.any():
            metrics["data/success_mean"] = float((right[seen] / samples[seen]).mean())
        return metrics


class SuccessSampler(StepOrder):
    """The prompts of each step, preferred by their success rates.

    `explore` of the draws, spread evenly, go through epochs of all prompts. The others of one `take` are drawn at
    random by weight, none twice and none that the epochs give there; once no prompt with a weight is left, the rest is
    drawn from the others alike.
    """

    def __init__(
        self, prompts: Sequence[Prompt], rates: SuccessRates, *, rule: str, explore: float, batch_size: int, seed: int,
        key: Sequence[int] = (),
    ) -> None:  # fmt: skip
        super().__init__(batch_size=batch_size, num_prompts=len(prompts))
        self._prompts, self._rates, self._rule = prompts, rates, rule
        self._places = rates.places(prompts)
        self._explore = Fraction(repr(explore))
        self._epochs = PromptSampler(prompts, batch_size=batch_size, shuffle=True, seed=seed, key=key)
        self._seed, self._key = seed, tuple(key)

    def take(self, first: int, count: int) -> list[Prompt]:
        before = [self._explored(number) for number in range(first, first + count + 1)]
        from_epochs = [self._epochs.position(number) for number in range(before[0], before[-1])]
        weights = self._rates.weights(self._places, self._rule)
        key = (self._seed, SUCCESS, first, *self._key)
        by_weight = draw_by_weight(weights, count - len(from_epochs), taken=from_epochs, key=key)
        explored, preferred = iter(from_epochs), iter(by_weight)
        return [self._prompts[next(explored if now > then else preferred)] for then, now in pairwise(before)]

    def prompt_of(self, number: int, row: int) -> Prompt:
        return next(prompt for prompt in self._prompts if prompt.index == row)  # the rates have changed since

    def metrics(self, drawn: int) -> Metrics:
        return super().metrics(drawn) | self._rates.metrics(self._places)

    def _explored(self, draws: int) -> int:
        """Return how many of the first draws go through epochs."""
        return draws * self._explore.numerator // self._explore.denominator


def draw_by_weight(weights: _Integers, count: int, *, taken: Sequence[int], key: Sequence[int]) -> list[int]:
    """Return `count` places, drawn by their weights among those not yet drawn.

    weights: [n] int64, not negative. taken: places that count as drawn. Where no weight is left the other places are
    drawn alike, and where no place is left, all again. A pure function of the arguments: raw Philox numbers, whose
    stream NumPy promises never to change, and sums of whole numbers.
    """
    numbers = np.random.Philox(np.random.SeedSequence(list(key)))
    left = weights.copy()
    free = np.ones(len(weights), dtype=bool)
    left[list(taken)], free[list(taken)] = 0, False
    drawn: list[int] = []
    while len(drawn) < count:
        if not left.any():
            if not free.any():
                free[:] = True
            left = free.astype(np.int64)
        bounds = np.cumsum(left)
        raw = numbers.random_raw(count - len(drawn)) % np.uint64(bounds[-1])
        places = np.searchsorted(bounds, raw.astype(np.int64), side="right")
        fresh = list(dict.fromkeys(places.tolist()))  # a place that comes again is drawn anew, among those left
        drawn += fresh
        left[fresh], free[fresh] = 0, False
    return drawn


def shares_of(weights: Mapping[str, float]) -> dict[str, int]:
    """Return each source's number of draws in a cycle, proportional to its weight (positive, finite).

    The cycle is the shortest one whose shares are exact, the weights as they are written: 3 and 0.5 are 6 and 1. Where
    it would be longer than MAX_CYCLE, shares are rounded to MAX_CYCLE draws by the largest remainders, at least one
    each.
    """
    exact = {name: Fraction(repr(float(weight))) for name, weight in weights.items()}
    common = math.lcm(*(weight.denominator for weight in exact.values()))
    whole = {name: int(weight * common) for name, weight in exact.items()}
    divisor = math.gcd(*whole.values())
    shares = {name: weight // divisor for name, weight in whole.items()}
    total = sum(shares.values())
    if total <= MAX_CYCLE:
        return shares
    rounded = {name: max(1, share * MAX_CYCLE // total) for name, share in shares.items()}
    by_remainder = sorted(shares, key=lambda name: (-(shares[name] * MAX_CYCLE % total), name))
    for name in by_remainder[: max(0, MAX_CYCLE - sum(rounded.values()))]:
        rounded[name] += 1
    return rounded


def weights_by_size(sizes: Mapping[str, int], temperature: float) -> dict[str, float]:
    """Return size^(1/temperature) of each source: 1 keeps the proportions, more evens them out."""
    if temperature == 1.0:
        return {name: float(size) for name, size in sizes.items()}
    largest = max(sizes.values())
    return {name: max((size / largest) ** (1.0 / temperature), _LEAST) for name, size in sizes.items()}


class DrawOrder:
    """The source of every draw, in endless cycles, and a draw's number within its source.

    Tijdeman 1980, "The chairman assignment problem": among the sources that are due, the one that would first be late.
    After n draws a source of share w has had n*w of them, less or more than 1 - 1/(2k - 2), k sources.
    """

    def __init__(self, shares: Sequence[int]) -> None:
        assert min(shares) > 0, f"shares={shares}"
        self._shares = list(shares)
        self._cycle = sum(shares)
        self._slack = max(1, 2 * len(shares) - 2)
        self._sources = array("H")  # source of each draw of the cycle, as far as they were asked for
        self._numbers = array("L")  # number of each of these draws within its source
        self._taken = [0] * len(shares)
        self._deadlines = [self._deadline(source) for source in range(len(shares))]

    def draw(self, number: int) -> tuple[int, int]:
        """Return (source, number of its earlier draws) of a draw, counted from 0."""
        cycle, place = divmod(number, self._cycle)
        while len(self._sources) <= place:
            self._extend()
        source = self._sources[place]
        return source, cycle * self._shares[source] + self._numbers[place]

    def counts(self, draws: int) -> list[int]:
        """Return each source's share of the first `draws` draws."""
        cycles, rest = divmod(draws, self._cycle)
        if rest:
            self.draw(rest - 1)
        own = np.bincount(np.frombuffer(self._sources, dtype=np.uint16)[:rest], minlength=len(self._shares))
        return [cycles * share + int(count) for share, count in zip(self._shares, own, strict=True)]

    def _extend(self) -> None:
        number = len(self._sources) + 1  # draws with this one
        source, earliest = -1, 0
        for candidate, share in enumerate(self._shares):
            is_due = self._slack * (number * share - self._cycle * self._taken[candidate]) >= self._cycle
            if is_due and (source < 0 or self._deadlines[candidate] < earliest):
                source, earliest = candidate, self._deadlines[candidate]
        self._sources.append(source)
        self._numbers.append(self._taken[source])
        self._taken[source] += 1
        self._deadlines[source] = self._deadline(source)

    def _deadline(self, source: int) -> int:
        """Return a number that orders sources by the draw at which they would be late.

        It is late after cycle * late / (slack * share) draws. Fractions late / share of shares up to MAX_CYCLE differ
        by 1e-12 or not at all, so these whole numbers are in their order.
        """
        late = self._slack * (self._taken[source] + 1) - 1
        return late * _LATE_SCALE // self._shares[source]


class MixtureSampler(StepOrder):
    """The prompts of each step from several sources, a pure function of arguments and step."""

    def __init__(
        self, samplers: Mapping[str, StepOrder], shares: Mapping[str, int], *, batch_size: int,
        rates: SuccessRates | None = None,
    ) -> None:  # fmt: skip
        """shares: from `shares_of`. rates: of all sources, if their orders follow them."""
        assert samplers.keys() == shares.keys()
        super().__init__(batch_size=batch_size, num_prompts=sum(own.num_prompts for own in samplers.values()))
        self._samplers = dict(sorted(samplers.items()))
        self.shares = {name: shares[name] for name in self._samplers}
        self._order = DrawOrder(list(self.shares.values()))
        self._rates = rates

    def take(self, first: int, count: int) -> list[Prompt]:
        draws = [self._order.draw(number) for number in range(first, first + count)]
        numbers: dict[int, list[int]] = {}  # source -> its draws, which follow one another
        for source, number in draws:
            numbers.setdefault(source, []).append(number)
        samplers = list(self._samplers.values())
        taken = {source: iter(samplers[source].take(own[0], len(own))) for source, own in numbers.items()}
        return [next(taken[source]) for source, _ in draws]

    def prompt_of(self, number: int, row: int) -> Prompt:
        source, own = self._order.draw(number)
        return list(self._samplers.values())[source].prompt_of(own, row)

    def numbers(self) -> dict[str, int]:
        numbers = {f"{name}/share": share for name, share in self.shares.items()}
        for name, sampler in self._samplers.items():
            numbers |= {f"{name}/{key}": value for key, value in sampler.numbers().items()}
        return numbers

    def restore(self, numbers: Mapping[str, int]) -> None:
        shares = {name: numbers[f"{name}/share"] for name in self.shares}
        if shares != self.shares:
            raise UserError(
                f"data.mixture: the checkpoint has shares of draws {shares}, this run {self.shares}; set weights and "
                "temperature back, or begin another run from an export"
            )
        for name, sampler in self._samplers.items():
            prefix = f"{name}/"
            sampler.restore({key.removeprefix(prefix): n for key, n in numbers.items() if key.startswith(prefix)})

    def waits(self) -> Metrics:
        own = [sampler.waits() for sampler in self._samplers.values()]
        return {name: sum(waits[name] for waits in own) for name in own[0]}

    def close(self) -> None:
        for sampler in self._samplers.values():
            sampler.close()

    def metrics(self, drawn: int) -> Metrics:
        # Streams have no epochs in common.
        metrics = super().metrics(drawn) if self.num_prompts else {"data/prompts": float(drawn)}
        if self._rates is not None:
            metrics |= self._rates.metrics()
        for (name, sampler), count in zip(self._samplers.items(), self._order.counts(drawn), strict=True):
            own = sampler.metrics(count)
            metrics |= {f"data/{name}/{key.removeprefix('data/')}": value for key, value in own.items()}
        return metrics


def key_of(name: str) -> list[int]:
    """Return non-negative integers that stand for a source's name."""
    digest = hashlib.sha256(name.encode()).digest()
    return [int.from_bytes(digest[at : at + 4], "big") for at in range(0, 16, 4)]
