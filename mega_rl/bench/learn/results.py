"""Results over seeds: means with 95 % bands, and the verdict on a task's statements. Imports no torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mega_rl.bench.learn.task import LearningTask, Reaches, Statement

MOST_SEEDS = 10
# Quantile 0.975 of Student's t by degrees of freedom, 1 to MOST_SEEDS - 1.
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclass(frozen=True)
class Curve:
    """Result of one run."""

    seed: int
    points: tuple[tuple[int, float], ...]  # (steps done, value)
    seconds: float

    def final(self, count: int) -> float:
        """Return the mean of the last `count` values."""
        return statistics.fmean(value for _, value in self.points[-count:])


@dataclass(frozen=True)
class ConfidenceBand:
    """A mean over seeds and the ends of its 95 % confidence interval; one seed has an interval of no width."""

    mean: float
    low: float
    high: float


def band(values: Sequence[float]) -> ConfidenceBand:
    """Return the mean and its interval, by Student's t: mean -+ t * s / sqrt(n), s the sample deviation."""
    mean, n = statistics.fmean(values), len(values)
    half = T_975[n - 2] * statistics.stdev(values) / math.sqrt(n) if n > 1 else 0.0
    return ConfidenceBand(mean, mean - half, mean + half)


@dataclass(frozen=True)
class VariantResult:
    """Curves of a variant, one of each seed, with points at the same steps."""

    name: str
    curves: tuple[Curve, ...]
    final: ConfidenceBand

    @property
    def bands(self) -> list[tuple[int, ConfidenceBand]]:
        """Return (steps done, band) of every point."""
        steps = [step for step, _ in self.curves[0].points]
        return [(step, band([curve.points[i][1] for curve in self.curves])) for i, step in enumerate(steps)]


@dataclass(frozen=True)
class Judgement:
    """A statement in words and whether it holds."""

    variant: str  # that it is about
    text: str
    holds: bool


@dataclass(frozen=True)
class TaskResult:
    """Result of a task."""

    task: LearningTask
    variants: tuple[VariantResult, ...]
    verdicts: tuple[Judgement, ...]


def summarize(task: LearningTask, curves: Mapping[str, Sequence[Curve]]) -> TaskResult:
    """Return the result of a task from the curves of its variants, by their names."""
    variants = tuple(
        VariantResult(name, tuple(runs), band([run.final(task.final_points) for run in runs]))
        for name, runs in curves.items()
    )
    finals = {variant.name: variant.final for variant in variants}
    return TaskResult(task, variants, tuple(judge(task, statement, finals) for statement in task.statements))


def judge(task: LearningTask, statement: Statement, finals: Mapping[str, ConfidenceBand]) -> Judgement:
    """Return whether a statement holds for the final bands of the variants."""
    above = task.better == "higher"
    own = finals[statement.variant]
    end = own.low if above else own.high  # the worse end of the band
    if isinstance(statement, Reaches):
        sign = ">=" if above else "<="
        holds = end >= statement.bound if above else end <= statement.bound
        return Judgement(statement.variant, f"{statement.variant}: band {sign} {statement.bound:g}", holds)
    other = finals[statement.other]
    holds = end > other.high if above else end < other.low
    return Judgement(statement.variant, f"{statement.variant} beats {statement.other}, bands apart", holds)


def record(result: TaskResult) -> dict[str, object]:
    """Return a result as JSON holds it."""
    return {
        "task": result.task.name,
        "summary": result.task.summary,
        "unit": result.task.unit,
        "better": result.task.better,
        "holds": all(verdict.holds for verdict in result.verdicts),
        "statements": [{"text": verdict.text, "holds": verdict.holds} for verdict in result.verdicts],
        "variants": [
            {
                "name": variant.name,
                "final": {"mean": variant.final.mean, "low": variant.final.low, "high": variant.final.high},
                "seeds": [
                    {"seed": curve.seed, "seconds": round(curve.seconds, 1), "points": curve.points}
                    for curve in variant.curves
                ],
            }
            for variant in result.variants
        ],
    }
