"""The PPO loop. GRPO is the same loop without a critic."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from mega_rl.algorithms.advantages.base import AdvantageEstimator
from mega_rl.algorithms.kl import KLController, RewardKL
from mega_rl.protocols import (
    CheckpointStore,
    Learner,
    MetricsSink,
    Ranks,
    RolloutSource,
    Scorer,
    TokenModel,
    WeightSync,
)
from mega_rl.tracking import progress
from mega_rl.trainer.dumps import ReadResponse, sample_rows
from mega_rl.trainer.experience import MinibatchPlan, build_experience, check_rows
from mega_rl.trainer.greedy import WithGreedyRewards, greedy_metrics, greedy_rewards
from mega_rl.trainer.hints import AbsentRewards, FlatRewards, GradientSpikes
from mega_rl.trainer.old_logprobs import OldLogprobs
from mega_rl.trainer.overlong import Overlong
from mega_rl.trainer.recording import NoRecorder, RecordedStep, StepSink
from mega_rl.trainer.step_metrics import experience_metrics, mean_metrics, part_metrics, rollout_metrics
from mega_rl.trainer.unscored import leave_unscored_out
from mega_rl.trainer.validation import Evaluation, named
from mega_rl.types import JsonObject, Metrics, Prompt, Rewards, Rollout


class PromptSource(Protocol):
    """The prompts that steps train on; their order is a pure function of how many were drawn before."""

    def batch(self, step: int) -> list[Prompt]:
        """Return the prompts of a step, counted from 0; asked for once for each step, in order."""
        ...

    def drawn_after(self, done: int) -> int:
        """Return the number of prompts drawn when so many steps are done; a checkpoint keeps it."""
        ...


class Timer(Protocol):
    """Named phases of a step."""

    def phase(self, name: str) -> AbstractContextManager[None]: ...

    def reset(self) -> None: ...

    def metrics(self) -> Metrics: ...


@dataclass(frozen=True)
class RunSettings:
    """Length of the run, samples of a prompt, and intervals of validation, saving, export and dumps."""

    steps: int
    samples: int = 0  # samples of each prompt; 0: as many as the source gives
    val_interval: int = 0  # steps; 0 never
    save_interval: int = 0  # steps; 0 never
    memory_interval: int = 0  # steps between checkpoints in the hosts' memory; 0 never
    save_final: bool = False
    hf_interval: int = 0  # steps between Hugging Face checkpoints; 0 never
    hf_final: bool = False
    rollout_interval: int = 0  # steps between rollout dumps; 0 never, and none of validations
    rollout_samples: int = 0

    def dumps(self, done: int) -> bool:
        """Return whether rollouts of the step that is now done are dumped: the first, the last and every N-th."""
        return self.rollout_interval > 0 and (done in (1, self.steps) or _due(done, self.rollout_interval))


@dataclass
class PPOTrainer:
    """Loop of a run, the same on every rank; a role that it lacks (critic, reference) is an object without effect."""

    settings: RunSettings
    prompts: PromptSource
    validation: Evaluation
    rollout: RolloutSource
    reward: Scorer
    actor: Learner
    critic: Learner
    reference: TokenModel
    estimator: AdvantageEstimator
    reward_kl: RewardKL | None  # the KL penalty in token rewards
    minibatches: MinibatchPlan
    kl: KLController
    update_reference: Callable[[int], Metrics]  # where it is due after so many steps; collective
    staleness: Callable[[Rollout], Metrics]  # raises for samples that are older than the run allows
    old_logprobs: OldLogprobs
    sync: WeightSync
    ranks: Ranks  # the data-parallel replicas
    timer: Timer
    metrics: MetricsSink
    checkpoints: CheckpointStore
    export: Callable[[int], None]  # writes the actor as a Hugging Face checkpoint, given the steps done; collective
    read: ReadResponse
    render: Callable[[Sequence[int]], str]  # with all special tokens
    stop_requested: Callable[[], bool]
    recorder: StepSink = field(default_factory=NoRecorder)  # of complete steps, which can be replayed
    overlong: Overlong = field(default_factory=Overlong)  # responses that reach the length limit
    greedy_baseline: bool = False  # the estimator needs rewards of greedy responses
    count_data: Callable[[int], Metrics] = lambda drawn: {"data/prompts": float(drawn)}  # given the prompts drawn
    start: int = 0  # steps done by the checkpoint that the parts were restored from

    def fit(self) -> int:
        """Train from step `start` on; returns the number of steps done in all.

        Stops early, with a checkpoint, when a stop is requested (SIGTERM, SIGUSR1, Ctrl-C). Of a run that was finished
        before, only the Hugging Face checkpoint of `hf_final` is written.
        """
        with self.timer.phase("sync_weights"):
            self.sync.publish()
        done = self.start
        if self.start == 0 and (before := self._validate(0)):
            self.metrics.log(0, before)
        hints = FlatRewards(), AbsentRewards(), GradientSpikes()
        with progress.rounds("step", self.settings.steps, done=done) as steps:
            for step in range(self.start, self.settings.steps):
                self.timer.reset()
                self._save_in_memory(step)
                metrics = self.step(step)
                for hint in hints:
                    hint(metrics)
                done = step + 1
                if done == self.settings.steps or _due(done, self.settings.val_interval):
                    metrics |= self._validate(done)
                stopping = self.stop_requested()
                metrics |= self._save_and_export(done, metrics, stopping=stopping)
                steps.advance()
                self.metrics.log(done, metrics | self.timer.metrics())
                if stopping:
                    break
        with self.timer.phase("checkpoint"):
            if self.start >= self.settings.steps and self.settings.hf_final:
                self.export(self.start)
            self.checkpoints.finish()
        return done

    def step(self, step: int) -> Metrics:
        """Generate, score, evaluate, learn, publish."""
        phase = self.timer.phase
        prompts = self.prompts.batch(step)
        estimator, baseline = self._estimator(prompts, step)
        with phase("generate"):
            rollout = self.rollout.generate(prompts, step=step)
            check_rows(rollout, prompts, self.ranks, samples=self.settings.samples)
            metrics = baseline | self.rollout.metrics() | self.staleness(rollout)
        with phase("reward"):
            rewards = self.reward.score(rollout, prompts)
            metrics |= rollout_metrics(rollout, rewards, self.ranks) | self.reward.metrics()
            metrics |= part_metrics(rewards.parts, rollout, self.ranks)
            kept, of_kept = leave_unscored_out(rollout, rewards)
            shaped, of_overlong = self.overlong.shape(kept, of_kept, self.ranks)
        with phase("old_logprobs"):
            old, mismatch = self.old_logprobs.evaluate(kept)
        with phase("ref_logprobs"):
            ref = self.reference.evaluate(kept)
        with phase("values"):
            values = self.critic.evaluate(kept)
        with phase("advantages"):
            experience = build_experience(
                kept, shaped, old=old, ref=ref, critic=values,
                estimator=estimator, reward_kl=self.reward_kl, sum_over_ranks=self.ranks.sum,
            )  # fmt: skip
            experience = self.overlong.leave_out(experience, kept)
            metrics |= mismatch | of_overlong | experience_metrics(
                experience, self.ranks,
                has_reference=ref.logprobs is not None, has_critic=values.values is not None,
            )  # fmt: skip
            minibatches = list(self.minibatches.cut(experience, num_prompts=len(prompts), step=step, ranks=self.ranks))
        if self.recorder.is_due(step):
            with phase("log"):
                outputs = (old, ref, values)
                self.recorder(
                    RecordedStep(step, prompts, rollout, rewards, shaped, estimator, outputs, experience, minibatches)
                )
        with phase("update_critic"):
            metrics |= mean_metrics([self.critic.update(minibatch, step=step) for minibatch in minibatches])
        with phase("update_actor"):
            updates = [
                self.actor.update(batch, step=step, inspect=None if number else self.old_logprobs.inspect)
                for number, batch in enumerate(minibatches)
            ]
            metrics |= mean_metrics(updates)
            # A policy that stands still says nothing about the coefficient, and a run may have no reference.
            moved = any(update and not update.get("actor/skipped_steps") for update in updates)
            if "kl/ref" in metrics:
                metrics["kl/coef"] = self.kl.value
            if moved and "kl/ref" in metrics:
                self.kl.update(metrics["kl/ref"], num_sequences=int(metrics["rollout/sequences"]))
            metrics |= self.update_reference(step + 1)
        with phase("sync_weights"):
            metrics |= self.sync.publish()
        metrics |= self.count_data(self.prompts.drawn_after(step + 1))
        if self.settings.dumps(step + 1):
            rows = self._rows(step + 1, rollout, rewards, prompts, advantages=experience.advantages)
            self.metrics.dump_rollouts(step + 1, rows)
        return metrics

    def _estimator(self, prompts: Sequence[Prompt], step: int) -> tuple[AdvantageEstimator, Metrics]:
        """Return the step's estimator, with greedy rewards from the current weights where it needs them; metrics."""
        if not self.greedy_baseline:
            return self.estimator, {}
        with self.timer.phase("baseline"):
            rollout = self.rollout.generate(prompts, step=step, greedy=True)
            check_rows(rollout, prompts, self.ranks, samples=1)
            scores = self.reward.score(rollout, prompts)
            rewards = greedy_rewards(rollout, scores.totals, num_prompts=len(prompts))
            return WithGreedyRewards(self.estimator, rewards), greedy_metrics(rewards, self.ranks)

    def _validate(self, done: int) -> Metrics:
        """Return the metrics of every set of held-out prompts; empty without validation."""
        if not (self.settings.val_interval and self.validation.sets):
            return {}
        with self.timer.phase("validate"):
            outcomes = self.validation.run(
                done, rollout=self.rollout, reward=self.reward, ranks=self.ranks, read=self.read
            )
        if self.settings.rollout_interval:
            rows = [
                {**row, "set": one.prompts.name}
                for one in outcomes
                for row in self._rows(done, one.samples.rollout, one.samples.rewards, one.samples.prompts)
            ]
            self.metrics.dump_rollouts(done, rows, validation=True)
        return named(outcomes)

    def _save_in_memory(self, done: int) -> None:
        """Save in memory what is due when a step begins: the steps before are logged, and the last one needs none."""
        if done > self.start and _due(done, self.settings.memory_interval):
            with self.timer.phase("checkpoint"):
                self.checkpoints.save_in_memory(done, self._state(done))

    def _state(self, done: int) -> JsonObject:
        """Return the loop's own state after `done` steps, as JSON carries it."""
        return {
            "kl": self.kl.state(),
            "weight_version": self.sync.weight_version,
            "prompts_drawn": self.prompts.drawn_after(done),
        }

    def _save_and_export(self, done: int, metrics: Metrics, *, stopping: bool) -> Metrics:
        """Save and export what is due after a step; returns the metrics of saves that have ended."""
        settings = self.settings
        last = done == settings.steps
        saves = stopping or (last and settings.save_final) or _due(done, settings.save_interval)
        exports = (last and settings.hf_final) or _due(done, settings.hf_interval)
        if saves or exports:
            with self.timer.phase("checkpoint"):
                if saves:
                    self.checkpoints.save(done, self._state(done), metrics=metrics)
                if exports:
                    self.export(done)
        return self.checkpoints.poll()

    def _rows(
        self,
        done: int,
        rollout: Rollout,
        rewards: Rewards,
        prompts: Sequence[Prompt],
        *,
        advantages: Tensor | None = None,
    ) -> list[Mapping[str, Any]]:
        """Return the samples of a step that are dumped, or of a validation, which has no advantages."""
        with self.timer.phase("log"):
            return sample_rows(
                rollout, rewards, prompts, self.read, render=self.render,
                step=done, count=self.settings.rollout_samples, advantages=advantages,
            )  # fmt: skip


def _due(done: int, interval: int) -> bool:
    """Return whether an action with this interval is due after `done` steps; 0 is never."""
    return interval > 0 and done % interval == 0
