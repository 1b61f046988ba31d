"""Statistics of a metric's history that rules ask for: its beginning, its end, its rise, steps beyond a limit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

MIN_STEPS = 10  # fewer say nothing of a trend
_SHARE = 5  # beginning and end are a fifth of the history each


@dataclass(frozen=True)
class History:
    """Finite values of a metric in the order of steps; `steps` and `values` have the same length."""

    steps: Sequence[int]
    values: Sequence[float]

    @property
    def has_trend(self) -> bool:
        """Return whether the history is long enough to speak of a trend."""
        return len(self.values) >= MIN_STEPS

    @property
    def beginning(self) -> float:
        """Return the median of the first fifth."""
        return median(self.values[: self._window])

    @property
    def end(self) -> float:
        """Return the median of the last fifth."""
        return median(self.values[-self._window :])

    @property
    def before_end(self) -> float:
        """Return the median of the fifth before the last one."""
        return median(self.values[-2 * self._window : -self._window])

    @property
    def size(self) -> float:
        """Return the median of absolute values."""
        return median(map(abs, self.values))

    def grows(self, factor: float, *, above: float) -> bool:
        """Return whether the end is `factor` times the beginning and beyond `above`, and has not turned back."""
        long_enough = self.has_trend and self.end > above and self.end > factor * max(self.beginning, 0.0)
        return long_enough and self.end >= 0.9 * self.before_end

    def first_beyond(self, limit: float) -> int:
        """Return the first step of the last unbroken stretch above `limit`; the last step if there is none."""
        step = self.steps[-1]
        for number in range(len(self.values) - 1, -1, -1):
            if self.values[number] <= limit:
                break
            step = self.steps[number]
        return step

    def first_below(self, limit: float) -> int:
        """Return the first step of the last unbroken stretch below `limit`; the last step if there is none."""
        return History(self.steps, [-value for value in self.values]).first_beyond(-limit)

    @property
    def _window(self) -> int:
        return max(1, len(self.values) // _SHARE)


Histories = Mapping[str, History]


def history_of(steps: Sequence[int], values: Sequence[float]) -> History:
    """Return the history of a metric, values that are NaN or infinite left out."""
    kept = [(step, value) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
    return History([step for step, _ in kept], [value for _, value in kept])


def correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Return Pearson's correlation of two sequences of one length, 0 where either is constant."""
    n = len(one)
    mean_one, mean_other = math.fsum(one) / n, math.fsum(other) / n
    covariance = math.fsum((a - mean_one) * (b - mean_other) for a, b in zip(one, other, strict=True))
    scale = math.sqrt(math.fsum((a - mean_one) ** 2 for a in one) * math.fsum((b - mean_other) ** 2 for b in other))
    return covariance / scale if scale > 0.0 else 0.0
