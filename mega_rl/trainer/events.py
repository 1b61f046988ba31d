"""Events around the steps of a run: hints, dumps of rollouts, validation, checkpoints and exports."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
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
SPIKE = 100.0  # most times the run's median that an update's gradient norm may be


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
            rows = [
                {**row, "set": one.prompts.name}
                for one in outcomes
                for row in self._rows(done, Samples(one.samples.prompts, one.samples.rollout, one.samples.rewards))
            ]
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
    """Log hints for runs without anything to learn, and for gradients that one token dominates."""

    log: StepLog
    _said: set[str] = field(default_factory=set, init=False)  # hints that come once
    # Steps in a row in which all responses to each prompt got the same reward; in which no token has an advantage.
    _flat: int = field(default=0, init=False)
    _idle: int = field(default=0, init=False)
    _norms: list[float] = field(default_factory=list, init=False)  # gradient norms: mean over the updates of each step

    def after(self, done: int, evaluated: Evaluated | None) -> bool:
        if evaluated is not None:
            self.hint(self.log.metrics)
        return False

    def hint(self, metrics: Metrics) -> None:
        """Log hints on a step by its metrics; steps without rewards or groups do not count."""
        if metrics.get(MASKED) == 1.0 and self._first("absent"):
            fails = any(metrics.get(f"reward/{kind}") for kind in ("timeouts", "crashes", "errors"))
            log.info(
                "%s=1: every response of the step was left out, so that there is nothing to learn from; the reward "
                "returns None for all of them%s",
                MASKED,
                " or fails, with reward.source.on_failure=mask: look at the warnings above" if fails else "",
            )
        self._flat = self._flat + 1 if metrics.get(EQUAL_GROUPS) == 1.0 else 0
        idle = "reward/mean" in metrics and metrics.get("advantage/abs_mean") == 0.0
        self._idle = self._idle + 1 if idle else 0
        if max(self._flat, self._idle) >= FLAT_STEPS and self._first("flat"):
            self._say_flat(metrics)
        if "actor/grad_norm_max" in metrics:
            self._watch_gradients(metrics["actor/grad_norm_max"], metrics["actor/grad_norm"])

    def _first(self, hint: str) -> bool:
        """Return whether a hint has not been logged yet; from now on it has."""
        is_new = hint not in self._said
        self._said.add(hint)
        return is_new

    def _say_flat(self, metrics: Metrics) -> None:
        """Log why the run learns nothing."""
        filtered = metrics.get("rollout/filtered_fraction", 0.0)
        if filtered == 1.0:
            log.warning(
                "in each of %d steps no token trains: the length limit cut off every response of this step, and "
                "reward.overlong.filter=true leaves such responses out; raise rollout.max_new_tokens, or take the "
                "filter off",
                FLAT_STEPS,
            )
        elif self._flat < FLAT_STEPS:
            log.warning(
                "in each of %d steps no token that trains has an advantage: the run learns nothing; responses with a "
                "reward above or below the others' are left out (rollout/filtered_fraction=%.3g, %s=%.3g)",
                *(FLAT_STEPS, filtered, MASKED, metrics.get(MASKED, 0.0)),
            )
        else:
            log.info(
                "in each of %d steps all responses to a prompt got the same reward (%.4g on average): there is nothing "
                "to prefer; look at rollouts/ and the reward function, raise rollout.n or rollout.temperature, or take "
                "other prompts",
                *(FLAT_STEPS, metrics["reward/mean"]),
            )

    def _watch_gradients(self, largest: float, mean: float) -> None:
        """Warn of an update whose gradient norm is far above the run's median."""
        usual = median(self._norms) if len(self._norms) >= FLAT_STEPS else 0.0
        if largest > SPIKE * usual > 0.0:
            log.warning(
                "an update's gradient norm is %.4g, the run's median is %.4g: a token dominates the update, and "
                "clipping to optim.clip_grad takes the rest of it away; look at actor/ratio_max and at rows of the "
                "embedding that nothing has trained",
                *(largest, usual),
            )
        self._norms.append(mean)
