"""Prompts preferred by the success rate of their samples, which the run measures.

Rules of preference, of a prompt whose samples are right with probability p:

    learnable   p (1 - p)   Foster et al. 2025, arXiv:2502.12272: the policy gradient grows with the variance of success
    unsolved    1 - p       Kimi Team 2025 (Kimi k1.5), arXiv:2501.12599, prioritized sampling

A share of the draws still goes through epochs, so that prompts which are no longer preferred are measured again. The
order is a function of the seed, the number of earlier draws and the rates, which a checkpoint keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from mega_rl.data.sampling.epochs import SUCCESS, PromptSampler, StepOrder
from mega_rl.types import Metrics, Prompt

_Floats: TypeAlias = npt.NDArray[np.float64]
_Integers: TypeAlias = npt.NDArray[np.int64]

_SCALE = 1 << 30  # makes weights whole numbers, whose sums are exact on every machine
# Rule -> (weight of a success rate, weight of a prompt without samples: the mean over all rates).
PREFERENCES: Mapping[str, tuple[Callable[[_Floats], _Floats], float]] = {
    "learnable": (lambda rate: rate * (1.0 - rate), 1.0 / 6.0),
    "unsolved": (lambda rate: 1.0 - rate, 0.5),
}


@dataclass(frozen=True)
class Preference:
    """Rule of preference, and the share of the draws that it leaves to epochs."""

    rule: str  # one of PREFERENCES
    explore: float  # share of the draws that go through epochs, above 0, below 1


class SuccessRates:
    """Success of every training prompt in its samples so far, the same on all ranks."""

    def __init__(self, prompts: Sequence[Prompt], *, memory: float) -> None:
        """prompts: of the run, by ascending `Prompt.index`. memory: of earlier samples at a new visit, 0 to 1."""
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
        """Add the numbers of right samples and of samples of a visit; 0 of 0 is no visit."""
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
        return np.floor(weights * _SCALE).astype(np.int64)

    def metrics(self, places: _Integers | None = None) -> Metrics:
        """Return the mean rate of prompts with samples, and the shares of unseen, solved and unsolved ones.

        places: of the prompts that are meant; None: all.
        """
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
        self, prompts: Sequence[Prompt], rates: SuccessRates, preference: Preference, *, batch_size: int, seed: int,
        key: Sequence[int] = (),
    ) -> None:  # fmt: skip
        super().__init__(batch_size=batch_size, num_prompts=len(prompts))
        self._prompts, self._rates, self._rule = prompts, rates, preference.rule
        self._places = rates.places(prompts)
        self._explore = Fraction(repr(preference.explore))
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

    def metrics(self, drawn: int) -> Metrics:
        return super().metrics(drawn) | self._rates.metrics(self._places)

    def _explored(self, draws: int) -> int:
        """Return how many of the first draws go through epochs."""
        return draws * self._explore.numerator // self._explore.denominator


def draw_by_weight(weights: _Integers, count: int, *, taken: Sequence[int], key: Sequence[int]) -> list[int]:
    """Return `count` places, drawn one after the other in proportion to their weights among those not yet drawn.

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
