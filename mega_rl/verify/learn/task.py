"""Descriptions of learning tasks: prompts, reward, settings, variants, and the statements that must hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

Settings = Mapping[str, object]


@dataclass(frozen=True)
class StepMetric:
    """Measure: a metric of the trainer, at the steps that have it."""

    name: str


@dataclass(frozen=True)
class ExpectedReward:
    """Measure: the policy's exact expected reward, over every response of `length` tokens to every prompt."""

    length: int
    interval: int = 10  # steps between two points


@dataclass(frozen=True)
class ClosedFormDistance:
    """Measure: exact KL(pi || pi*) in nats, pi*(y) ~ ref(y) exp(r(y) / beta), over every response."""

    length: int
    beta: float
    interval: int = 10  # steps between two points


@dataclass(frozen=True)
class Variant:
    """One way to train on a task."""

    name: str
    settings: Settings = field(default_factory=dict)  # over the task's
    ablation: bool = False  # lacks a part, and runs with --ablations only
    noise: float = 0.0  # share of tokens that the sampler draws at random; its log-probs are those of this mixture


@dataclass(frozen=True)
class Reaches:
    """Statement: the 95 % band of a variant ends on the right side of a bound."""

    variant: str
    bound: float


@dataclass(frozen=True)
class Beats:
    """Statement: the 95 % bands of two variants are apart, the first one on the better side."""

    variant: str
    other: str


@dataclass(frozen=True)
class LearningTask:
    """A task with everything that a run of it needs."""

    name: str
    summary: str
    vocabulary: str  # one token per character
    prompts: Sequence[tuple[str, str]]  # (prompt, answer)
    reward: Callable[..., float]
    settings: Settings
    variants: Sequence[Variant]
    statements: Sequence[Reaches | Beats]
    measure: StepMetric | ExpectedReward | ClosedFormDistance
    unit: str  # unit of the measure
    held_out: Sequence[tuple[str, str]] = ()  # (prompt, answer) of greedy validation
    better: str = "higher"  # or "lower"
    stop: str = ""  # the character that ends a response; empty: every response has full length
    final_points: int = 1  # last points of a curve whose mean is the run's result
