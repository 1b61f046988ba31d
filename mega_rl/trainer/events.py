"""Events around the steps of a run: hints, dumps of rollouts, validation, checkpoints and exports."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from mega_rl.config.schema import CheckpointConfig
from mega_rl.protocols import CheckpointStore, MetricsSink
from mega_rl.trainer.loop import Event, Stages, StepLog
from mega_rl.trainer.policy_gradient import Evaluated
from mega_rl.trainer.recording import sample_rows
from mega_rl.trainer.rows import ReadResponse, Samples
from mega_rl.trainer.step_metrics import EQUAL_GROUPS
from mega_rl.trainer.validation import Evaluation, SetOutcome, named
from mega_rl.types import JsonObject, Metrics

log = logging.getLogger(__name__)

FLAT_STEPS = 5  # in a row, before the hint
MASKED = "reward/masked_fraction"


def is_due(done: int, interval: int) -> bool:
    """Return whether an action with this interval is due after `done` steps; 0 is never."""
    return interval > 0 and done % interval == 0


@dataclass
class DumpRollouts(Event):
    """Write readable rollouts of the first, the last and every N-th step, and of validations."""

    sink: MetricsSink
    read: ReadResponse
    render: Callable[[Sequence[int]], str]  # with all special tokens
    stage: Stages
    steps: int  # length of the run
    interval: int  # steps; 0 writes none
    count: int  # samples of each dump

    def after(self, done: int, evaluated: Evaluated | None) -> bool:
        if evaluated is not None and self.interval and (done in (1, self.steps) or is_due(done, self.interval)):
            rows = self._rows(done, evaluated.batch.samples, advantages=evaluated.experience.advantages)
            self.sink.dump_rollouts(done, rows)
        return False

    def validation(self, done: int, outcomes: Sequence[SetOutcome]) -> None:
        """Write samples of each set of held-out prompts."""
        if self.interval:
            shown = [(one.prompts.name, Samples(*one.samples[2:5])) for one in outcomes]
            rows = [{**row, "set": name} for name, samples in shown for row in self._rows(done, samples)]
            self.sink.dump_rollouts(done, rows, validation=True)

    def _rows(self, done: int, samples: Samples, advantages: Tensor | None = None) -> list[Mapping[str, Any]]:
        with self.stage("log"):
            return sample_rows(
                samples, self.read, render=self.render, step=done, count=self.count, advantages=advantages
            )  # fmt: skip


@dataclass
class Validate(Event):
    """Evaluate the policy on held-out prompts: before the first step, every N-th, and after the last."""

    evaluation: Evaluation
    dumps: DumpRollouts
    stage: Stages
    log: StepLog
    steps: int  # length of the run
    interval: int  # steps; 0 never

    def after(self, done: int, evaluated: Evaluated | None) -> bool:
        due = done == 0 if evaluated is None else done == self.steps or is_due(done, self.interval)
        if not (due and self.interval and self.evaluation.sets):
            return False
        with self.stage("validate"):
            outcomes = self.evaluation.run(done)
        self.dumps.validation(done, outcomes)
        self.log.add(named(outcomes))
        return False


@dataclass
class SaveAndExport(Event):
    """Save and export when due; on a request to stop, save and end the run."""

    checkpoints: CheckpointStore
    export: Callable[[int], None]  # writes the actor as a Hugging Face checkpoint, given the steps done; collective
    state: Callable[[int], JsonObject]  # state of the loop's parts, given the steps done
    stop_requested: Callable[[], bool]  # collective
    settings: CheckpointConfig
    stage: Stages
    log: StepLog
    steps: int  # length of the run
    start: int  # steps done when the run began

    def before(self, step: int) -> None:
        """Save in memory, once the steps before are logged; the last step needs no such checkpoint."""
        if step > self.start and is_due(step, self.settings.memory.interval):
            with self.stage("checkpoint"):
                self.stage.hold("save")
                self.checkpoints.save_in_memory(step, self.state(step))

    def after(self, done: int, evaluated: Evaluated | None) -> bool:
        if evaluated is None:
            return False
        stopping, last, settings = self.stop_requested(), done == self.steps, self.settings
        saves = stopping or (last and settings.save_final) or is_due(done, settings.save_interval)
        exports = (last and settings.hf_final) or is_due(done, settings.hf_interval)
        if saves or exports:
            with self.stage("checkpoint"):
                if saves:
                    self.stage.hold("save")
                    self.checkpoints.save(done, self.state(done), metrics=dict(self.log.metrics))
                if exports:
                    self._export(done)
        self.log.add(self.checkpoints.poll())
        return stopping

    def finish(self, done: int) -> None:
        """Wait for the save in progress; export if the run was finished before it began."""
        with self.stage("checkpoint"):
            if self.start >= self.steps and self.settings.hf_final:
                self._export(self.start)
            self.checkpoints.finish()

    def _export(self, done: int) -> None:
        self.stage.hold("export")
        self.export(done)


@dataclass
class Warn(Event):
    """Log a hint, once, when a run has nothing to learn from."""

    log: StepLog
    _said: bool = field(default=False, init=False)
    # Steps in a row in which all responses to each prompt got the same reward; in which no token has an advantage.
    _flat: int = field(default=0, init=False)
    _idle: int = field(default=0, init=False)

    def after(self, done: int, evaluated: Evaluated | None) -> bool:
        if evaluated is not None and not self._said:
            self.hint(self.log.metrics)
        return False

    def hint(self, metrics: Metrics) -> None:
        """Log a hint on a step by its metrics; steps without rewards or groups do not count."""
        self._flat = self._flat + 1 if metrics.get(EQUAL_GROUPS) == 1.0 else 0
        idle = "reward/mean" in metrics and metrics.get("advantage/abs_mean") == 0.0
        self._idle = self._idle + 1 if idle else 0
        filtered, masked = metrics.get("rollout/filtered_fraction", 0.0), metrics.get(MASKED, 0.0)
        self._said = True
        if masked == 1.0:
            log.warning(
                "%s=1: the reward left out every response of the step, by None or by a failure with "
                "reward.source.on_failure=mask, so that there is nothing to learn from",
                MASKED,
            )
        elif self._flat >= FLAT_STEPS and filtered < 1.0:
            log.warning(
                "in each of %d steps all responses to a prompt got the same reward (%.4g on average): there is nothing "
                "to prefer; look at rollouts/ and the reward function, raise rollout.n or rollout.temperature, or take "
                "other prompts",
                *(FLAT_STEPS, metrics["reward/mean"]),
            )
        elif max(self._flat, self._idle) >= FLAT_STEPS:
            log.warning(
                "in each of %d steps no token that trains has an advantage: the run learns nothing; the length filter "
                "or the reward leaves responses out (rollout/filtered_fraction=%.3g, %s=%.3g); raise "
                "rollout.max_new_tokens, or set reward.overlong.filter=false",
                *(FLAT_STEPS, filtered, MASKED, masked),
            )
        else:
            self._said = False
