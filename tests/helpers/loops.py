"""The whole loop on fakes; attributes of a `FakeRun` are its parts, which a test may replace before `fit`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mega_rl.algorithms.advantages import GAE, GRPO
from mega_rl.algorithms.kl import KLController
from mega_rl.algorithms.losses import AGGREGATIONS
from mega_rl.config.schema import CheckpointConfig
from mega_rl.config.schema.training import MemoryCheckpointConfig
from mega_rl.trainer.collect import Batch, Collector, SamplingPlan
from mega_rl.trainer.events import DumpRollouts, SaveAndExport, Validate, Warn
from mega_rl.trainer.loop import Resident, Stages, StepLog, Trainer
from mega_rl.trainer.mismatch import MismatchGuard, MismatchLimits
from mega_rl.trainer.policy_gradient import MinibatchPlan, PolicyGradient, PolicyGradientRules
from mega_rl.trainer.selection import AtOnce, Stock
from mega_rl.types import Metrics, Rollout
from tests.helpers.fakes import (
    FakeCritic,
    FakePolicy,
    FakePrompts,
    FakeRanks,
    FakeReward,
    FakeSink,
    FakeStore,
    FakeTimer,
    held_out,
)


@dataclass(frozen=True)
class RunSettings:
    """Length and intervals of a fake run."""

    steps: int
    val_interval: int = 0
    save_interval: int = 0
    memory_interval: int = 0
    save_final: bool = False
    hf_interval: int = 0
    hf_final: bool = False
    rollout_interval: int = 0
    rollout_samples: int = 0


def read_ids(rollout: Rollout, row: int) -> tuple[str, str]:
    """Return the ids of a response without its last one, twice."""
    first, end = int(rollout.prompt_lengths[row]), int(rollout.lengths[row])
    text = " ".join(map(str, rollout.tokens[row, first : end - 1].tolist()))
    return text, text


def watch_batches(trainer: Trainer, note: Callable[[Batch], None]) -> None:
    """Call `note` with the batch of each step."""
    take = trainer.batches.take

    def noted(step: int) -> Batch:
        batch: Batch = take(step)
        note(batch)
        return batch

    trainer.batches.take = noted  # type: ignore[method-assign]


def watch_source(trainer: Trainer, note: Callable[[Rollout], None]) -> None:
    """Call `note` with every rollout of the run's source, those of validations and greedy responses, too."""
    source = trainer.batches.source  # type: ignore[attr-defined]
    generate = source.generate

    def noted(prompts: Any, **how: Any) -> Rollout:
        rollout: Rollout = generate(prompts, **how)
        note(rollout)
        return rollout

    object.__setattr__(source, "generate", noted)


def step_metrics(trainer: Trainer, number: int) -> Metrics:
    """Make one step of a run; return its metrics."""
    trainer.log.begin()
    trainer.step(number)
    return trainer.log.metrics


def engines_of(trainer: Trainer) -> dict[str, Any]:
    """Return the engines of a run's models by role."""
    return dict(trainer.stage.devices.models.engines)  # type: ignore[attr-defined]


def checkpoints_of(trainer: Trainer) -> Any:
    """Return the checkpoint store of a run."""
    return next(event.checkpoints for event in trainer.events if isinstance(event, SaveAndExport))


class FakeRun:
    """Parts of a run by name."""

    def __init__(self, *, grpo: bool = False, **changes: Any) -> None:
        self.events: list[str] = []
        policy = FakePolicy(self.events)
        parts: dict[str, Any] = {
            "settings": RunSettings(steps=3),
            "prompts": FakePrompts(),
            "plan": SamplingPlan(),
            "validation": held_out([]),
            "rollout": policy,
            "reward": FakeReward(self.events),
            "actor": policy,
            "critic": None if grpo else FakeCritic(self.events),
            "reference": None,
            "estimator": GRPO() if grpo else GAE(),
            "minibatches": MinibatchPlan(
                2, 1, AGGREGATIONS["token-mean"], max_response_tokens=4, seed=0, ranks=FakeRanks()
            ),
            "reward_kl": None,
            "guard": MismatchGuard(MismatchLimits(mean=1.0, share=1.0, max=0.5), ranks=FakeRanks()),
            "rules": PolicyGradientRules(),
            "kl": KLController(0.0),
            "update_reference": lambda done: {},
            "staleness": lambda rollout: {},
            "success": None,
            "stock": None,
            "sync": policy,
            "ranks": FakeRanks(),
            "timer": FakeTimer(),
            "devices": Resident(),
            "metrics": FakeSink(),
            "checkpoints": FakeStore(self.events),
            "stop_requested": lambda: False,
            "start": 0,
            "more_events": [],
        }
        unknown = changes.keys() - parts.keys()
        assert not unknown, f"a fake run has no {unknown}"
        self.parts = parts
        vars(self).update(parts | changes)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def build(self) -> Trainer:
        """Return the loop of the parts as they are now."""
        settings: RunSettings = self.settings
        stage, log = Stages(self.timer, self.devices), StepLog(self.metrics, self.timer)
        stock = self.stock or (Stock(AtOnce(self.rollout)) if self.plan.waves else None)
        batches = Collector(
            self.prompts, self.rollout, self.reward, self.plan, self.ranks, stage, log,
            staleness=self.staleness, success=self.success, stock=stock,
        )  # fmt: skip
        algorithm = PolicyGradient(
            self.actor, self.critic, self.reference, self.estimator, self.minibatches, self.guard,
            reward_kl=self.reward_kl, kl=self.kl, update_reference=self.update_reference, rules=self.rules,
            stage=stage, log=log,
        )  # fmt: skip
        dumps = DumpRollouts(
            self.metrics, read_ids, lambda ids: "+".join(map(str, ids)), stage,
            steps=settings.steps, interval=settings.rollout_interval, count=settings.rollout_samples,
        )  # fmt: skip
        evaluation = self.validation(self.rollout, self.reward, self.ranks, read_ids, hold=stage.hold)
        validate = Validate(evaluation, dumps, stage, log, settings.steps, settings.val_interval)
        save = SaveAndExport(
            self.checkpoints,
            export=lambda done: self.events.append(f"export {done}") or {},
            state=lambda done: {"kl": self.kl.state(), "weight_version": self.sync.weight_version, "prompts_drawn": 0},
            stop_requested=self.stop_requested,
            settings=CheckpointConfig(
                save_interval=settings.save_interval,
                save_final=settings.save_final,
                hf_interval=settings.hf_interval,
                hf_final=settings.hf_final,
                memory=MemoryCheckpointConfig(settings.memory_interval),
            ),
            stage=stage,
            log=log,
            steps=settings.steps,
            start=self.start,
        )
        events = [dumps, Warn(log), validate, save, *self.more_events]
        return Trainer(batches, algorithm, self.sync, events, stage, log, settings.steps, self.start)

    def fit(self) -> int:
        """Run the loop; return the steps done."""
        return self.build().fit()

    def step(self, number: int) -> Metrics:
        """Make one step; return its metrics."""
        return step_metrics(self.build(), number)
