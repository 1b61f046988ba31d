"""The loop of a run.

    batches.take -> algorithm.evaluate -> algorithm.update -> sync.publish -> events
       |                  |                     |                  |              |
    generate, reward   log-probs, values,   critic, actor      weights to      validate, save,
                       advantages                              the sampler     export, dump

Every rank runs it. PPO, GRPO and distillation are one `Algorithm`; a new kind of training is another object here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from mega_rl.protocols import MetricsSink, WeightSync
from mega_rl.tracking import progress
from mega_rl.tracking.metrics.steps import PhaseTimer, StepMeter
from mega_rl.types import Metrics


class Devices(Protocol):
    """State that the stages of a step have on the devices. All methods are collective."""

    def enter(self, stage: str) -> None:
        """Move other state off the devices, then bring what the stage needs; most stages move nothing."""

    def publish(self, sync: WeightSync) -> Metrics:
        """Send the weights and leave the devices to the sampler; return the metrics of both."""

    def restore(self) -> None:
        """Bring the trainer's state back before an error travels on."""


class Resident:
    """Devices of a run whose models and servers all stay where they are."""

    def enter(self, stage: str) -> None:
        """Move nothing."""

    def publish(self, sync: WeightSync) -> Metrics:
        """Send the weights."""
        return sync.publish()

    def restore(self) -> None:
        """Move nothing."""


@dataclass
class Stages:
    """Stages of a step: `with stage("generate"):` times the work, shows progress, brings state.

    A stage is sticky: leaving it moves nothing, and the next one moves only the difference.
    """

    timer: StepMeter | PhaseTimer
    devices: Devices = field(default_factory=Resident)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the block as `name`, with the stage's state on the devices. Stages do not nest."""
        with self.timer.phase(name):
            try:
                self.devices.enter(name)
                yield
            except BaseException:
                self.devices.restore()
                raise

    def hold(self, name: str) -> None:
        """Bring the state of another stage within one, such as a validation's reward model."""
        self.devices.enter(name)

    def publish(self, sync: WeightSync) -> Metrics:
        """Send the weights in a stage of their own."""
        with self("sync_weights"):
            return self.devices.publish(sync)


@dataclass
class StepLog:
    """Metrics of the current step: parts add them, events read them, the loop writes them."""

    sink: MetricsSink
    timer: StepMeter | PhaseTimer
    metrics: Metrics = field(default_factory=dict, init=False)

    def begin(self) -> None:
        """Begin a step without metrics."""
        self.metrics = {}
        self.timer.reset()

    def add(self, metrics: Metrics) -> None:
        """Add metrics; a name that is there gets the new value."""
        self.metrics |= metrics

    def write(self, done: int, *, timed: bool = True) -> None:
        """Write the record of a step with its times; untimed, only if there are metrics."""
        if timed or self.metrics:
            self.sink.log(done, self.metrics | (self.timer.metrics() if timed else {}))


class BatchSource(Protocol):
    """Source of the batches that steps train on."""

    def take(self, step: int) -> object:
        """Return the batch of a step, counted from 0; called once per step, in order; collective."""


class Algorithm(Protocol):
    """Computation on a batch, and the updates that learn from it."""

    def evaluate(self, batch: Any, step: int) -> object:
        """Return the batch with everything that an update needs; changes no weight; collective."""

    def update(self, evaluated: Any, step: int) -> None:
        """Make the optimizer steps of a batch; collective."""


class Event:
    """Action around steps when it is due. All methods are collective; by default they do nothing."""

    def before(self, step: int) -> None:
        """Act before a step, counted from 0, when the record of the previous step is written."""

    def evaluated(self, step: int, evaluated: Any) -> None:
        """Act on an evaluated batch, before any weight changes."""

    def after(self, done: int, evaluated: Any) -> bool:
        """Act when `done` steps are done; return True to end the run.

        evaluated: None before the first step.
        """
        return False

    def finish(self, done: int) -> None:
        """Act at the end of the run, after `done` steps."""


@dataclass
class Trainer:
    """The loop of a run, the same on every rank."""

    batches: BatchSource  # samples of the policy, demonstrations, preferences
    algorithm: Algorithm
    sync: WeightSync  # sends new weights to those who generate
    events: Sequence[Event]  # in this order
    stage: Stages
    log: StepLog
    steps: int  # length of the run
    start: int = 0  # steps done by the checkpoint that the parts were restored from

    def fit(self) -> int:
        """Train from step `start` on; returns the number of steps done in all."""
        self.stage.publish(self.sync)
        done, stopping = self.start, self._after(self.start, None)
        self.log.write(done, timed=False)
        with progress.rounds("step", self.steps, done=done) as rounds:
            while done < self.steps and not stopping:
                self.log.begin()
                for event in self.events:
                    event.before(done)
                evaluated = self.step(done)
                done += 1
                stopping = self._after(done, evaluated)
                rounds.advance()
                self.log.write(done)
        for event in self.events:
            event.finish(done)
        return done

    def step(self, number: int) -> object:
        """Make one step, counted from 0; returns the evaluated batch."""
        batch = self.batches.take(number)
        evaluated = self.algorithm.evaluate(batch, number)
        for event in self.events:
            event.evaluated(number, evaluated)
        self.algorithm.update(evaluated, number)
        self.log.add(self.stage.publish(self.sync))
        return evaluated

    def _after(self, done: int, evaluated: object) -> bool:
        return any([event.after(done, evaluated) for event in self.events])
