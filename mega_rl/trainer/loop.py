"""The loop of a run.

    batches.take -> algorithm.evaluate -> algorithm.update -> sync.publish -> events
       |                  |                     |                  |              |
    generate, reward   log-probs, values,   critic, actor      weights to      validate, save,
                       advantages                              the sampler     export, dump

Every rank runs it. Learning from given answers has other `batches`, another `algorithm` and nothing to publish.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

import torch

from mega_rl.errors import RunError, UserError
from mega_rl.protocols import MetricsSink, Ranks, WeightSync
from mega_rl.tracking import progress
from mega_rl.tracking.health.guard import SIGNALS
from mega_rl.tracking.metrics.steps import PhaseTimer, StepMeter
from mega_rl.types import Metrics

if TYPE_CHECKING:
    from mega_rl.workers.residency import Residency


log = logging.getLogger(__name__)


class Resident:
    """Devices of a run whose models and servers stay; else see `workers.residency`."""

    def enter(self, stage: str) -> None:
        """Move other state off the devices, then bring what the stage needs; collective."""

    def publish(self, sync: WeightSync) -> Metrics:
        """Send the weights and leave the devices to the sampler; return the metrics of both; collective."""
        return sync.publish()

    def restore(self) -> None:
        """Bring the trainer's state back before an error travels on; collective."""


@dataclass
class Stages:
    """Stages of a step: `with stage("generate"):` times the work, shows progress, brings state.

    A stage is sticky: leaving it moves nothing, and the next one moves only the difference.
    """

    timer: StepMeter | PhaseTimer
    devices: Resident | Residency = field(default_factory=Resident)

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
    last: Metrics = field(default_factory=dict, init=False)  # metrics of the step before

    def begin(self) -> None:
        """Begin a step without metrics."""
        self.last, self.metrics = self.metrics, {}
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

    def take(self, step: int) -> Any:
        """Return the batch of a step, counted from 0; called once per step, in order; collective."""


class Algorithm(Protocol):
    """Kind of training: PPO, GRPO and distillation are a `PolicyGradient`, given answers have `FromAnswers`."""

    def evaluate(self, batch: Any, step: int) -> Any:
        """Return the batch with all that its updates need, before any weight changes; collective."""

    def update(self, evaluated: Any, step: int) -> None:
        """Update the models; collective."""


class Event:
    """Action around steps when it is due. All methods are collective; by default they do nothing."""

    def before(self, step: int) -> bool:
        """Act before a step, counted from 0, and after the last, once the step before is logged; True ends the run."""
        return False

    def evaluated(self, step: int, evaluated: Any) -> None:
        """Act on an evaluated batch, before any weight changes."""

    def updated(self, step: int) -> None:
        """Act on the updated models, before their weights are sent."""

    def after(self, done: int, evaluated: Any) -> None:
        """Act when `done` steps are done, before the last is logged. evaluated: None before the first step."""

    def finish(self, done: int) -> None:
        """Act at the end of the run, after `done` steps."""


@dataclass
class Trainer:
    """The loop of a run, the same on every rank."""

    batches: BatchSource
    algorithm: Algorithm
    sync: WeightSync  # sends new weights to those who generate
    events: Sequence[Event]  # in this order
    stage: Stages
    log: StepLog
    steps: int  # length of the run
    start: int = 0  # steps done by the checkpoint that the parts were restored from
    take_turn: Callable[[], None] = lambda: None  # puts the run to work where several have one engine; collective

    def fit(self) -> int:
        """Train from step `start` on; returns the number of steps done in all."""
        return fit_together([self])[0]

    def turns(self) -> Iterator[int]:
        """Train from step `start` on, a step between two turns; yields the steps done."""
        self.stage.publish(self.sync)
        done = self.start
        self._after(done, None)
        self.log.write(done, timed=False)
        with progress.rounds("step", self.steps, done=done) as rounds:
            while True:
                yield done
                self.log.begin()
                if any([event.before(done) for event in self.events]) or done >= self.steps:
                    break
                evaluated = self.step(done)
                done += 1
                self._after(done, evaluated)
                rounds.advance()
                self.log.write(done)
        for event in self.events:
            event.finish(done)
        if done > self.start:  # else the record is that of an earlier run
            self.log.write(done, timed=False)

    def step(self, number: int) -> object:
        """Make one step, counted from 0; returns the evaluated batch."""
        batch = self.batches.take(number)
        evaluated = self.algorithm.evaluate(batch, number)
        for event in self.events:
            event.evaluated(number, evaluated)
        self.algorithm.update(evaluated, number)
        for event in self.events:
            event.updated(number)
        self.log.add(self.stage.publish(self.sync))
        return evaluated

    def _after(self, done: int, evaluated: object) -> None:
        for event in self.events:
            event.after(done, evaluated)


def fit_together(trainers: Sequence[Trainer]) -> list[int]:
    """Train runs, a step of each in turn, to their ends; return the steps of each."""
    done = [trainer.start for trainer in trainers]
    at_work = {number: trainer.turns() for number, trainer in enumerate(trainers)}
    while at_work:
        for number, turns in list(at_work.items()):
            trainers[number].take_turn()
            try:
                done[number] = next(turns)
            except StopIteration:
                del at_work[number]
            except (RunError, UserError):
                log.error("run %d of %d cannot continue, which ends them all", number + 1, len(trainers))
                raise
    return done


INTERRUPTED = b"\r\x1b[2Kinterrupted: ended at once, without a checkpoint of the step in progress\n"


class StopRequest:
    """The last of `SIGNALS` that came: the step ends first. A second SIGINT interrupts at once.

    Ranks get their signals at different times, or only one does, so `__call__` asks all of them: either every rank
    stops after this step or none does. Collective over `ranks`. Outside the main thread, where Python sets no handlers,
    there is never a request.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._received = 0  # signal number of this rank
        self._agreed = 0  # the largest of all ranks' signals at the last call
        numbers = SIGNALS if threading.current_thread() is threading.main_thread() else ()
        self._previous = {number: signal.signal(number, self._remember) for number in numbers}

    def __call__(self) -> bool:
        """Return whether any rank has a signal to stop."""
        # A signal that comes while the ranks talk stays in `_received`, for the next question.
        self._agreed = int(self._ranks.max(torch.tensor(self._received)))
        return self._agreed != 0

    @property
    def exit_code(self) -> int:
        """Exit code that a shell expects: 128 plus the signal's number; 0 without a signal."""
        return 128 + self._agreed if self._agreed else 0

    def restore(self) -> None:
        """Put the handlers back that were there before."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self._received and number == signal.SIGINT:
            if os.environ.get("RANK", "0") == "0":
                os.write(2, INTERRUPTED)  # past sys.stderr, which this thread may be writing to
            raise KeyboardInterrupt
        if not self._received:
            # The signal may have come while this thread writes a line; another one waits for its end.
            threading.Thread(target=_answer, args=(number,), name="answer to a signal", daemon=True).start()
        self._received = number


def _answer(number: int) -> None:
    """Say on rank 0 what the signal leads to; the other ranks' information is not shown."""
    steps = next((phase for phase in progress.active() if phase.rounds), None)
    doing = "the first step" if steps is None else f"step {steps.done + 1:.0f}"
    again = "; Ctrl-C again stops at once" if number == signal.SIGINT else ""
    log.info("%s: finishing %s, then saving%s", signal.Signals(number).name, doing, again)
