"""Roles whose floating-point operations and tokens are counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mega_rl.protocols import Inspect, Learner, RolloutSource, Teacher, TokenModel
from mega_rl.tracking.metrics.flops import ModelWork
from mega_rl.tracking.metrics.steps import WorkMeter
from mega_rl.types import Draws, Experience, Lesson, Metrics, Prompt, Rollout, TokenOutputs


@dataclass
class MeteredModel:
    """A model that evaluates, with a meter of this rank's share of it: a replica's ranks do a part each."""

    model: TokenModel
    work: ModelWork
    meter: WorkMeter
    replica_size: int  # ranks that hold one copy of the model between them

    def evaluate(self, batch: Rollout | Experience) -> TokenOutputs:
        self.meter.total += self.work.forward(batch.lengths.tolist()) / self.replica_size
        self.meter.count(float(batch.lengths.sum()) / self.replica_size)
        return self.model.evaluate(batch)


@dataclass
class MeteredTeacher:
    """A model that teaches, with a meter of this rank's share of it."""

    model: Teacher
    work: ModelWork
    meter: WorkMeter
    replica_size: int

    def teach(self, minibatch: Experience) -> Lesson:
        self.meter.total += self.work.forward(minibatch.lengths.tolist()) / self.replica_size
        return self.model.teach(minibatch)


@dataclass
class MeteredLearner(MeteredModel):
    """A role that trains, with a meter."""

    model: Learner

    def update(self, minibatch: Experience, *, step: int, inspect: Inspect | None = None) -> Metrics:
        metrics = self.model.update(minibatch, step=step, inspect=inspect)
        if metrics:  # of a step that trains nothing there are none
            self.meter.total += self.work.update(minibatch.lengths.tolist()) / self.replica_size
            self.meter.count(float(minibatch.lengths.sum()) / self.replica_size)
        return metrics


@dataclass
class MeteredRollouts:
    """A source of rollouts, with a meter of this rank's share of the response tokens."""

    source: RolloutSource
    meter: WorkMeter
    replica_size: int

    def generate(
        self, prompts: Sequence[Prompt], *, step: int, greedy: bool = False, draws: Draws | None = None
    ) -> Rollout:
        rollout = self.source.generate(prompts, step=step, greedy=greedy, draws=draws)
        self.meter.count(float(rollout.loss_mask.sum()) / self.replica_size)
        return rollout

    def metrics(self) -> Metrics:
        return self.source.metrics()
