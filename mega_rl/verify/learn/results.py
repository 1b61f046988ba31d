"""Results over seeds: means with 95 % bands, and verdicts on statements."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from mega_rl.verify.learn.tasks import LearningTask, Statement

MOST_SEEDS = 10
# Quantile 0.975 of Student's t by degrees of freedom, 1 to MOST_SEEDS - 1.
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


class Curve(NamedTuple):
    """Result of one run."""

    seed: int
    points: tuple[tuple[int, float], ...]  # (steps done, value)
    seconds: float

    def final(self, count: int) -> float:
        """Return the mean of the last `count` values."""
        return statistics.fmean(value for _, value in self.points[-count:])


class ConfidenceBand(NamedTuple):
    """A mean over seeds with its 95 % confidence interval; one seed has no width."""

    mean: float
    low: float
    high: float


def band(values: Sequence[float]) -> ConfidenceBand:
    """Return mean -+ t * s / sqrt(n), by Student's t; s is the sample deviation."""
    mean, n = statistics.fmean(values), len(values)
    half = T_975[n - 2] * statistics.stdev(values) / math.sqrt(n) if n > 1 else 0.0
    return ConfidenceBand(mean, mean - half, mean + half)


@dataclass(frozen=True)
class TaskResult:
    """Curves of a task by variant, one of each seed, with points at the same steps."""

    task: LearningTask
    curves: Mapping[str, Sequence[Curve]]

    @cached_property
    def finals(self) -> dict[str, ConfidenceBand]:
        """Return the band of each variant's result."""
        count = self.task.final_points
        return {name: band([run.final(count) for run in runs]) for name, runs in self.curves.items()}

    @cached_property
    def verdicts(self) -> list[tuple[Statement, str, bool]]:
        """Return each statement in words, and whether it holds."""
        return [(each, *judge(self.task, each, self.finals)) for each in self.task.statements]

    @property
    def holds(self) -> bool:
        """Return whether every statement holds."""
        return all(holds for _, _, holds in self.verdicts)


def judge(task: LearningTask, statement: Statement, finals: Mapping[str, ConfidenceBand]) -> tuple[str, bool]:
    """Return a statement in words, and whether it holds for the final bands of the variants."""
    above, own = task.better == "higher", finals[statement.variant]
    end = own.low if above else own.high  # the worse end of the band
    if statement.beats:
        other = finals[statement.beats]
        return f"beats {statement.beats}, bands apart", end > other.high if above else end < other.low
    sign, holds = (">=", end >= statement.reaches) if above else ("<=", end <= statement.reaches)
    return f"band {sign} {statement.reaches:g}", holds


def record(result: TaskResult) -> dict[str, object]:
    """Return a result for JSON."""
    task = result.task
    return {
        **{"task": task.name, "summary": task.summary, "unit": task.unit, "better": task.better},
        "holds": result.holds,
        "statements": [{"text": f"{each.variant}: {text}", "holds": holds} for each, text, holds in result.verdicts],
        "variants": [
            {
                "name": name,
                "final": result.finals[name]._asdict(),
                "seeds": [
                    {"seed": curve.seed, "seconds": round(curve.seconds, 1), "points": curve.points} for curve in curves
                ],
            }
            for name, curves in result.curves.items()
        ],
    }
