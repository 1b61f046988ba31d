"""Runs of a learning task through the project's own trainer, one after the other in this process."""

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from mega_rl import api
from mega_rl.bench.learn.enumeration import closed_form_distance, enumerate_responses, expected_reward
from mega_rl.bench.learn.model import write_model
from mega_rl.bench.learn.noise import mix_with_uniform
from mega_rl.bench.learn.results import Curve
from mega_rl.bench.learn.task import ExpectedReward, LearningTask, StepMetric, Variant
from mega_rl.health.interruption import StoppedBySignal
from mega_rl.protocols import MetricsSink
from mega_rl.tracking.progress.terminal import standard_error
from mega_rl.trainer import PPOTrainer
from mega_rl.types import Metrics

log = logging.getLogger(__name__)

# Settings of every task. A small model in fp32 on one CPU: nothing is written that nobody reads.
SHARED: Mapping[str, object] = {
    "model.dtype": "fp32",
    "model.attn_implementation": "sdpa",
    "trainer.device": "cpu",
    "trainer.timeout_s": 120.0,
    "checkpoint.save_final": False,
    "checkpoint.resume": "never",
    "data.max_prompt_tokens": 8,
    "rollout.hf.batch_size": 4096,
    "metrics.tensorboard": False,
    "metrics.progress_bar": False,
    "metrics.rollout_interval": 0,
}


# (steps done, the step's metrics) -> the curve's value after that step; None: no point there
Probe = Callable[[int, Metrics], float | None]


@dataclass
class CurveRecorder:
    """Sink of metrics that also measures the trainer; called after every step."""

    sink: MetricsSink
    probe: Probe
    points: list[tuple[int, float]] = field(default_factory=list)

    def log(self, step: int, metrics: Metrics) -> None:
        self.sink.log(step, metrics)
        value = self.probe(step, metrics)
        if value is not None:
            self.points.append((step, value))

    def dump_rollouts(self, step: int, rows: Sequence[Mapping[str, object]], *, validation: bool = False) -> None:
        self.sink.dump_rollouts(step, rows, validation=validation)

    def close(self, *, failed: bool = False) -> None:
        self.sink.close(failed=failed)


def build_probe(task: LearningTask, trainer: PPOTrainer) -> Probe:
    """Return the task's measure of a trainer."""
    measure = task.measure
    if isinstance(measure, StepMetric):
        return lambda step, metrics: metrics.get(measure.name)
    rows, rewards = enumerate_responses(task, length=measure.length)
    if isinstance(measure, ExpectedReward):
        value: Callable[[], float] = partial(expected_reward, trainer, rows, rewards)
    else:
        value = partial(closed_form_distance, trainer, rows, rewards, beta=measure.beta)
    return lambda step, metrics: None if step % measure.interval else value()


def run_variant(task: LearningTask, variant: Variant, *, seed: int, steps: int | None = None) -> Curve:
    """Train a variant of a task with a seed of model, data order and sampling; `steps` in place of the task's own.

    Raises StoppedBySignal after a signal, even in the last step.
    """
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="mega-rl-learn-") as name:
        folder = Path(name)
        write_model(folder / "model", task.vocabulary, stop=task.stop, seed=seed)
        files = {"train": task.prompts, "held_out": task.held_out}
        for file, rows in files.items():
            lines = (json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in rows)
            (folder / f"{file}.jsonl").write_text("".join(lines), encoding="utf-8")
        settings = {
            **SHARED,
            **task.settings,
            **variant.settings,
            "model.path": str(folder / "model"),
            "data.train_files": [str(folder / "train.jsonl")],
            "data.val_files": [str(folder / "held_out.jsonl")] if task.held_out else [],
            "trainer.run_dir": str(folder / "run"),
            "trainer.seed": seed,
        }
        if steps is not None:
            settings["trainer.steps"] = steps
        with api.Trainer.from_config(None, settings, reward=task.reward) as trainer:
            loop = trainer.loop
            if variant.noise:
                mix_with_uniform(loop.rollout, share=variant.noise)
            loop.metrics = recorder = CurveRecorder(loop.metrics, build_probe(task, loop))
            outcome = trainer.fit()
    if outcome.stopped:
        raise StoppedBySignal(outcome.exit_code - 128)
    return Curve(seed, tuple(recorder.points), time.perf_counter() - started)


def run_task(task: LearningTask, variants: Sequence[Variant], *, seeds: Sequence[int]) -> dict[str, list[Curve]]:
    """Train variants of a task with each seed; returns the curves by variant."""
    curves: dict[str, list[Curve]] = {}
    for variant in variants:
        for seed in seeds:
            with _quiet_trainer():
                curve = run_variant(task, variant, seed=seed)
            curves.setdefault(variant.name, []).append(curve)
            final = curve.final(task.final_points)
            log.info("%s, %s, seed %d: %.4g in %.0f s", task.name, variant.name, seed, final, curve.seconds)
    return curves


@contextmanager
def _quiet_trainer() -> Iterator[None]:
    """Leave out the trainer's own lines: a task has dozens of runs."""
    logger, console = logging.getLogger("mega_rl"), standard_error()
    before = logger.level
    logger.setLevel(logging.ERROR)
    console.quiet = True  # for the table of each run's start
    try:
        yield
    finally:
        console.quiet = False
        logger.setLevel(before)
