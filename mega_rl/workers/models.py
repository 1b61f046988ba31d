"""The roles that are models: actor, critic, reference: an engine, a loss, a learning rate."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from torch import Tensor

from mega_rl.algorithms.kl import KLController, KLEstimator, kl_metrics
from mega_rl.algorithms.losses import (
    Correction,
    KLTerm,
    PolicyObjective,
    PolicyTokens,
    SampledTokens,
    clipped_value_loss,
    nll_loss,
    policy_loss,
)
from mega_rl.algorithms.preferences import TrainingKind, preference_loss
from mega_rl.algorithms.statistics import Sequences
from mega_rl.errors import NonFiniteGradientError
from mega_rl.protocols import Inspect, LossOutput, ModelPasses, Teacher
from mega_rl.tracking.metrics.flops import ModelWork
from mega_rl.tracking.metrics.steps import WorkMeter
from mega_rl.types import TRAINED_TOKENS, Experience, Lesson, Metrics, Rollout, TokenOutputs
from mega_rl.workers.residency import EVERYTHING, PARAMETERS, ResidentModels

log = logging.getLogger(__name__)

SKIPPED = "skipped_steps"  # metric of a role: optimizer steps that were not made
LearningRate = Callable[[int], float]  # trainer steps since the role began to learn -> learning rate


@dataclass(frozen=True)
class PolicyLoss:
    """A policy's loss with its numbers (see `algorithms.losses`).

    on_policy: a step updates once, so the forward at hand gives the log-probs before the update, kl/ref and kl/ref_k1.
    """

    objective: PolicyObjective
    kl: KLController | None  # KL in the loss; None without
    kl_estimator: KLEstimator
    entropy_coef: float = 0.0
    drift_coef: float = 0.0
    correction: Correction | None = None
    on_policy: bool = False

    @property
    def needs_entropy(self) -> bool:
        return self.entropy_coef > 0.0

    def __call__(self, outputs: TokenOutputs, fields: Mapping[str, Tensor], sequences: Sequences) -> LossOutput:
        assert outputs.logprobs is not None
        old_logprobs = outputs.logprobs.detach() if self.on_policy else fields["old_logprobs"]
        own = {name: fields[name] for name in ("advantages", "token_weights", "loss_weights")}
        correction, metrics = None, dict[str, Tensor]()
        if self.correction is not None:
            sampled = SampledTokens(
                outputs.logprobs.detach(),
                old_logprobs,
                fields["rollout_logprobs"],
                advantages=fields["advantages"],
                token_weights=fields["token_weights"],
                sequences=sequences,
            )
            correction, metrics = self.correction(sampled)
            metrics |= {
                "actor/correction_weight_mean": sampled.mean(correction),
                "actor/correction_masked_fraction": sampled.mean((correction == 0).float()),
            }
        loss = policy_loss(
            PolicyTokens.of(
                outputs.logprobs, old_logprobs=old_logprobs, sequences=sequences, divergence=outputs.divergence, **own
            ),
            outputs.entropy,
            objective=self.objective,
            correction=correction,
            entropy_coef=self.entropy_coef,
            rollout_logprobs=fields["rollout_logprobs"] if self.drift_coef > 0.0 else None,
            drift_coef=self.drift_coef,
            kl=None if self.kl is None else KLTerm(fields["ref_logprobs"], self.kl.value, self.kl_estimator),
        )
        if self.on_policy and self.kl is not None:
            metrics |= kl_metrics(old_logprobs, fields["ref_logprobs"], token_weights=fields["token_weights"])
        return replace(loss, sums=loss.sums | metrics)


@dataclass(frozen=True)
class ValueLoss:
    """The clipped squared error of the critic (see `algorithms.losses`)."""

    value_clip: float
    needs_entropy: ClassVar[bool] = False

    def __call__(self, outputs: TokenOutputs, fields: Mapping[str, Tensor], sequences: Sequences) -> LossOutput:
        assert outputs.values is not None
        return clipped_value_loss(
            outputs.values,
            old_values=fields["values"],
            returns=fields["returns"],
            token_weights=fields["token_weights"],
            value_clip=self.value_clip,
        )


@dataclass(frozen=True)
class GivenLoss:
    """The loss of given answers: maximum likelihood, or a kind in `algorithms.preferences`."""

    kind: TrainingKind
    needs_entropy: ClassVar[bool] = False

    def __call__(self, outputs: TokenOutputs, fields: Mapping[str, Tensor], sequences: Sequences) -> LossOutput:
        numbers = outputs.values if self.kind.scores else outputs.logprobs
        assert numbers is not None
        if self.kind.form == "answers":
            return nll_loss(numbers, loss_weights=fields["loss_weights"])
        return preference_loss(
            self.kind,
            numbers,
            ref_logprobs=fields["ref_logprobs"],
            worth=fields["advantages"],
            baseline=fields["returns"],
            loss_weights=fields["loss_weights"],
            sequences=sequences,
        )


@dataclass(frozen=True)
class RoleMeter:
    """Counter of this rank's share of a role's work in a replica."""

    work: ModelWork
    meter: WorkMeter
    replica_size: int  # ranks that hold one copy of the model between them

    def forward(self, batch: Rollout | Experience, *, tokens: bool = True) -> None:
        """Count a forward of a batch; tokens: also those of the phase in progress."""
        self.meter.total += self.work.forward(batch.lengths.tolist()) / self.replica_size
        if tokens:
            self.meter.count(float(batch.lengths.sum()) / self.replica_size)

    def update(self, minibatch: Experience) -> None:
        """Count an optimizer step on a mini-batch."""
        self.meter.total += self.work.update(minibatch.lengths.tolist()) / self.replica_size
        self.meter.count(float(minibatch.lengths.sum()) / self.replica_size)


@dataclass(frozen=True)
class Lessons:
    """Lessons of a teacher to a student that minimises the divergence `beta`."""

    teacher: Teacher
    beta: float
    models: ResidentModels
    meter: RoleMeter

    def __call__(self, minibatch: Experience) -> Lesson:
        """Return the lesson on a mini-batch; collective.

        Where models take turns, the lesson has a copy of the vocabulary projection, since the student's turn follows.
        """
        self.meter.forward(minibatch, tokens=False)
        self.models.take_turn("reference", PARAMETERS)
        lesson = replace(self.teacher.teach(minibatch), beta=self.beta)
        if self.models.one_at_a_time and lesson.weight is not None:
            lesson = replace(lesson, weight=lesson.weight.clone())
        self.models.take_turn("actor", EVERYTHING)
        return lesson


@dataclass
class LearningWorker:
    """Actor or critic. `role` prefixes the engine's metrics; steps before `first_step` do not change the model.

    An optimizer step whose gradient norm is not finite is skipped, on all ranks alike; after more than
    `max_skipped_steps` in a row `update` raises NonFiniteGradientError. The step of a mini-batch without a token that
    trains is skipped too, and does not count among those in a row.
    """

    role: str
    engine: ModelPasses
    loss: PolicyLoss | ValueLoss | GivenLoss
    learning_rate: LearningRate
    first_step: int = 0
    max_skipped_steps: int = 0
    lessons: Lessons | None = None  # for a loss that needs a teacher
    meter: RoleMeter | None = None
    _skipped: int = field(default=0, init=False)  # in a row

    def evaluate(self, batch: Rollout | Experience) -> TokenOutputs:
        if self.meter is not None:
            self.meter.forward(batch)
        return self.engine.forward(batch, with_entropy=True) if self.loss.needs_entropy else self.engine.forward(batch)

    def update(self, minibatch: Experience, *, step: int, inspect: Inspect | None = None) -> Metrics:
        if step < self.first_step:
            return {}
        lr = self.learning_rate(step - self.first_step)
        lesson = None if self.lessons is None else self.lessons(minibatch)
        try:
            metrics = self.engine.train_minibatch(minibatch, self.loss, lr=lr, inspect=inspect, lesson=lesson)
            metrics[SKIPPED] = float(metrics.get(TRAINED_TOKENS) == 0.0)
            if not metrics[SKIPPED]:
                self._skipped = 0
        except NonFiniteGradientError as error:
            metrics = self._skip(error, step=step)
        if self.meter is not None:
            self.meter.update(minibatch)
        return {name if "/" in name else f"{self.role}/{name}": value for name, value in metrics.items()}

    def _skip(self, error: NonFiniteGradientError, *, step: int) -> Metrics:
        """Count a skipped step; return the update's finite metrics. Raises after too many in a row."""
        self._skipped += 1
        where = f"{self.role}, step {step + 1}: the gradient norm is {error.norm}"
        limit = f"optim.max_skipped_steps={self.max_skipped_steps}"
        if self._skipped > self.max_skipped_steps:
            times = "" if self._skipped == 1 else f" in {self._skipped} optimizer steps in a row"
            raise NonFiniteGradientError(
                f"{where}{times}; {limit} allows no more. No weight and no moment has changed. Resume from an earlier "
                "checkpoint with a lower optim.lr or optim.critic_lr, or try model.dtype=fp32",
                norm=error.norm,
                metrics=error.metrics,
            ) from error
        log.warning("%s; this optimizer step is skipped, number %d in a row (%s)", where, self._skipped, limit)
        return {name: value for name, value in error.metrics.items() if math.isfinite(value)} | {SKIPPED: 1.0}


@dataclass
class ReferenceWorker:
    """The frozen policy of the KL term."""

    forward: Callable[[Rollout | Experience], TokenOutputs]  # its engine's; collective
    meter: RoleMeter | None = None

    def evaluate(self, batch: Rollout | Experience) -> TokenOutputs:
        if self.meter is not None:
            self.meter.forward(batch)
        return self.forward(batch)


def reference_updates(interval: int = 0, mix: Callable[[], float] | None = None) -> Callable[[int], Metrics]:
    """Return the reference's updates; mix: makes one, due every `interval` steps, returns the distance."""

    def update(done: int) -> Metrics:
        if mix is None:
            return {}
        metrics = {"kl/reference_step": float(done - done % interval)}
        if done % interval == 0:
            metrics["kl/reference_distance"] = mix()
        return metrics

    return update
