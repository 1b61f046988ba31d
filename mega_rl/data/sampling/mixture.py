"""Prompts of each step from several sources by weight, epoch after epoch of each.

The sources' draws are spread as evenly as possible: after any number of draws each source has had its share, within one
prompt. The number of a draw decides its source, without a random number; the source's own order decides the prompt. A
run that is resumed with other shares begins their order at its next draw, and each source continues in its epoch, so a
checkpoint keeps that draw only.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from mega_rl.data.sampling.epochs import CurriculumSampler, Growth, PromptSampler, StepOrder
from mega_rl.data.sampling.success import Preference, SuccessRates, SuccessSampler
from mega_rl.types import Metrics, Prompt

MAX_CYCLE = 1_000_000  # draws after which the order of sources begins again; finer shares are rounded to it
_LEAST = 1e-12  # least weight next to the largest; a temperature near 0 would round it to nothing
_SCALE = 1 << 64
_BEGIN, _SHARE, _BEFORE = "begin", "share", "before"  # numbers of a checkpoint


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
    """Return size^(1/temperature) of each source: at 1 in proportion to the sizes, nearer to equal shares above."""
    if temperature == 1.0:
        return {name: float(size) for name, size in sizes.items()}
    largest = max(sizes.values())
    return {name: max((size / largest) ** (1.0 / temperature), _LEAST) for name, size in sizes.items()}


class DrawOrder:
    """The source of every draw, an endless order of whole cycles, and a draw's number within its source.

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
        return late * _SCALE // self._shares[source]


class MixtureSampler(StepOrder):
    """The prompts of each step from several sources, a pure function of the arguments and the step.

    Each source runs through its own epochs: a source that has ended an epoch begins the next while others continue.
    """

    def __init__(
        self, samplers: Mapping[str, StepOrder], shares: Mapping[str, int], *, batch_size: int,
        rates: SuccessRates | None = None,
    ) -> None:  # fmt: skip
        """shares: from `shares_of`. rates: of all sources, if their orders follow them."""
        assert samplers.keys() == shares.keys()
        super().__init__(batch_size=batch_size, num_prompts=sum(own.num_prompts for own in samplers.values()))
        self._names = sorted(samplers)
        self._samplers = [samplers[name] for name in self._names]
        self.shares = {name: shares[name] for name in self._names}
        self._order = DrawOrder(list(self.shares.values()))
        self._begin = 0  # first draw of the order
        self._before = [0] * len(self._names)  # each source's draws before it
        self._other: DrawOrder | None = None  # order up to here, of a run resumed with other shares
        self._rates = rates

    def take(self, first: int, count: int) -> list[Prompt]:
        draws = [self._draw(number) for number in range(first, first + count)]
        numbers: dict[int, list[int]] = {}  # source -> its draws, which follow one another
        for source, number in draws:
            numbers.setdefault(source, []).append(number)
        taken = {source: iter(self._samplers[source].take(own[0], len(own))) for source, own in numbers.items()}
        return [next(taken[source]) for source, _ in draws]

    def numbers(self) -> dict[str, int]:
        numbers = {_BEGIN: self._begin}
        for source, name in enumerate(self._names):
            numbers |= {f"{name}/{_SHARE}": self.shares[name], f"{name}/{_BEFORE}": self._before[source]}
            numbers |= {f"{name}/{key}": value for key, value in self._samplers[source].numbers().items()}
        return numbers

    def restore(self, numbers: Mapping[str, int]) -> None:
        for name, sampler in zip(self._names, self._samplers, strict=True):
            prefix = f"{name}/"
            sampler.restore({key.removeprefix(prefix): n for key, n in numbers.items() if key.startswith(prefix)})
        if _BEGIN not in numbers:
            return
        shares = [numbers[f"{name}/{_SHARE}"] for name in self._names]
        self._begin = numbers[_BEGIN]
        self._before = [numbers[f"{name}/{_BEFORE}"] for name in self._names]
        if shares != list(self.shares.values()):
            self._other = DrawOrder(shares)

    def waits(self) -> Metrics:
        own = [sampler.waits() for sampler in self._samplers]
        return {name: sum(waits[name] for waits in own) for name in own[0]}

    def close(self) -> None:
        for sampler in self._samplers:
            sampler.close()

    def _draw(self, number: int) -> tuple[int, int]:
        """Return (source, number within the source) of a draw."""
        if self._other is not None:  # the first draw of a run resumed with other shares
            self._before = self._counts(number, self._other)
            self._begin, self._other = number, None
        source, own = self._order.draw(number - self._begin)
        return source, self._before[source] + own

    def _counts(self, drawn: int, order: DrawOrder) -> list[int]:
        """Return each source's draws in all, by an order that began at `_begin`."""
        counts = order.counts(drawn - self._begin)
        return [before + count for before, count in zip(self._before, counts, strict=True)]

    def metrics(self, drawn: int) -> Metrics:
        # Streams have no epochs in common.
        metrics = super().metrics(drawn) if self.num_prompts else {"data/prompts": float(drawn)}
        if self._rates is not None:
            metrics |= self._rates.metrics()
        counts = self._counts(drawn, self._other or self._order)
        for name, sampler, count in zip(self._names, self._samplers, counts, strict=True):
            own = sampler.metrics(count)
            metrics |= {f"data/{name}/{key.removeprefix('data/')}": value for key, value in own.items()}
        return metrics


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
        """Return the order of a list of prompts; rates: measured success, if there is a preference."""
        if self.preference is not None and rates is not None:
            return SuccessSampler(prompts, rates, self.preference, batch_size=batch_size, seed=self.seed, key=key)
        if self.growth is not None:
            return CurriculumSampler(prompts, self.growth, batch_size=batch_size, seed=self.seed, key=key)
        return PromptSampler(prompts, batch_size=batch_size, shuffle=self.shuffle, seed=self.seed, key=key)


def mixture_of(
    prompts: Mapping[str, Sequence[Prompt]], weights: Mapping[str, float], plan: OrderPlan, *,
    batch_size: int, rates: SuccessRates | None = None,
) -> MixtureSampler:  # fmt: skip
    """Return a mixture of lists of prompts, each in the order of a plan; rates: measured success.

    A curriculum of a source grows over the source's share of the draws.
    """
    shares = shares_of(weights)
    samplers: dict[str, StepOrder] = {}
    for name, own in prompts.items():
        share = shares[name] / sum(shares.values())
        growth = plan.growth and replace(plan.growth, draws=math.ceil(share * plan.growth.draws))
        size = max(1, round(share * batch_size))
        samplers[name] = replace(plan, growth=growth).order(own, rates, batch_size=size, key=key_of(name))
    return MixtureSampler(samplers, shares, batch_size=batch_size, rates=rates)


def key_of(name: str) -> list[int]:
    """Return non-negative integers that stand for a source's name."""
    digest = hashlib.sha256(name.encode()).digest()
    return [int.from_bytes(digest[at : at + 4], "big") for at in range(0, 16, 4)]
