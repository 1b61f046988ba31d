"""Events around the steps of a run: hints, dumps of rollouts, validation, checkpoints and exports."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from torch import Tensor

from mega_rl.protocols import CheckpointStore, MetricsSink, Ranks, RolloutSource, Scorer
from mega_rl.trainer.dumps import ReadResponse, sample_rows
from mega_rl.trainer.loop import Event, Stages, StepLog
from mega_rl.trainer.policy_gradient import Evaluated
from mega_rl.trainer.rows import Samples
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
    """Write some rollouts for people to read: of the first step, the last and every N-th, and of validations."""

    sink: MetricsSink
    read: ReadResponse
    render: Callable[[Sequence[int]], str]  # with all special tokens
    stage: Stages
    steps: int  # of the run
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
                samples.rollout, samples.rewards, samples.prompts, self.read,
                render=self.render, step=done, count=self.count, advantages=advantages,
            )  # fmt: skip


@dataclass
class Validate(Event):
    """Evaluate the policy on held-out prompts: before the first step, every N-th, and after the last."""

    evaluation: Evaluation
    rollout: RolloutSource
    reward: Scorer
    ranks: Ranks  # the data-parallel replicas
    dumps: DumpRollouts
    stage: Stages
    log: StepLog
    steps: int  # of the run
    interval: int  # steps; 0 never

    def after(self, done: int, evaluated: Evaluated | None) -> bool:
        due = done == 0 if evaluated is None else done == self.steps or is_due(done, self.interval)
        if not (due and self.interval and self.evaluation.sets):
            return False
        with self.stage("validate"):
            outcomes = self.evaluation.run(
                done, rollout=self.rollout, reward=self.reward, ranks=self.ranks,
                read=self.dumps.read, hold=self.stage.hold,
            )  # fmt: skip
        self.dumps.validation(done, outcomes)
        self.log.add(named(outcomes))
        return False


@dataclass(frozen=True)
class SaveIntervals:
    """Steps between saves and exports; 0 never."""

    steps: int  # of the run
    start: int = 0  # steps done when the run began
    save: int = 0
    memory: int = 0  # checkpoints in the hosts' memory
    export: int = 0  # Hugging Face checkpoints
    save_final: bool = False
    export_final: bool = False


@dataclass
class SaveAndExport(Event):
    """Save checkpoints and export the actor where due, and end the run when a stop is requested, after a save."""

    checkpoints: CheckpointStore
    export: Callable[[int], None]  # writes the actor as a Hugging Face checkpoint, given the steps done; collective
    state: Callable[[int], JsonObject]  # of the loop's parts, given the steps done
    stop_requested: Callable[[], bool]  # collective
    intervals: SaveIntervals
    stage: Stages
    log: StepLog

    def before(self, step: int) -> None:
        """Save in memory: the steps before are logged by now, and the last one needs no checkpoint in memory."""
        if step > self.intervals.start and is_due(step, self.intervals.memory):
            with self.stage("checkpoint"):
                self.stage.hold("save")
                self.checkpoints.save_in_memory(step, self.state(step))

    def after(self, done: int, evaluated: Evaluated | None) -> bool:
        if evaluated is None:
            return False
        stopping, last = self.stop_requested(), done == self.intervals.steps
        saves = stopping or (last and self.intervals.save_final) or is_due(done, self.intervals.save)
        exports = (last and self.intervals.export_final) or is_due(done, self.intervals.export)
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
        """Wait for the save in progress. A run that was finished before still exports, if it is to."""
        with self.stage("checkpoint"):
            if self.intervals.start >= self.intervals.steps and self.intervals.export_final:
                self._export(self.intervals.start)
            self.checkpoints.finish()

    def _export(self, done: int) -> None:
        self.stage.hold("export")
        self.export(done)


@dataclass
class Warn(Event):
    """Log hints for a run that has nothing to learn from, or whose gradient one token dominates."""

    log: StepLog
    hints: Sequence[Callable[[Metrics], None]] = field(
        default_factory=lambda: (FlatRewards(), AbsentRewards(), GradientSpikes())
    )

    def after(self, done: int, evaluated: Evaluated | None) -> bool:
        if evaluated is not None:
            for hint in self.hints:
                hint(self.log.metrics)
        return False


class AbsentRewards:
    """Hint at the first step in which every response was left out: its update learns nothing."""

    def __init__(self) -> None:
        self._said = False

    def __call__(self, metrics: Metrics) -> None:
        """Take the metrics of one step."""
        if self._said or metrics.get(MASKED) != 1.0:
            return
        self._said = True
        log.info(
            "%s=1: every response of the step was left out, so that there is nothing to learn from; the reward returns "
            "None for all of them%s",
            MASKED,
            " or fails, with reward.source.on_failure=mask: look at the warnings above" if _failed(metrics) else "",
        )


def _failed(metrics: Metrics) -> bool:
    return any(metrics.get(f"reward/{kind}") for kind in ("timeouts", "crashes", "errors"))


class FlatRewards:
    """Counter of steps in a row that give the policy nothing to prefer; logs one hint.

    All responses to each prompt got the same reward, or no token of the step that trains has an advantage.
    """

    def __init__(self) -> None:
        self._flat = self._idle = 0
        self._said = False

    def __call__(self, metrics: Metrics) -> None:
        """Take the metrics of one step; steps without rewards, or without groups of samples, do not count."""
        self._flat = self._flat + 1 if metrics.get(EQUAL_GROUPS) == 1.0 else 0
        idle = "reward/mean" in metrics and metrics.get("advantage/abs_mean") == 0.0
        self._idle = self._idle + 1 if idle else 0
        if max(self._flat, self._idle) < FLAT_STEPS or self._said:
            return
        self._said = True
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


class GradientSpikes:
    """Warning at each step with an update whose gradient norm is a hundred times the run's median."""

    def __init__(self) -> None:
        self._norms: list[float] = []  # mean over the updates of each step

    def __call__(self, metrics: Metrics) -> None:
        """Take the metrics of one step."""
        if "actor/grad_norm_max" not in metrics:
            return
        largest = metrics["actor/grad_norm_max"]
        usual = median(self._norms) if len(self._norms) >= FLAT_STEPS else 0.0
        if largest > SPIKE * usual > 0.0:
            log.warning(
                "an update's gradient norm is %.4g, the run's median is %.4g: a token dominates the update, and "
                "clipping to optim.clip_grad takes the rest of it away; look at actor/ratio_max and at rows of the "
                "embedding that nothing has trained",
                *(largest, usual),
            )
        self._norms.append(metrics["actor/grad_norm"])
