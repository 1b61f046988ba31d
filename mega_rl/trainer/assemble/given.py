"""Parts of a loop that learns from given answers."""

from __future__ import annotations

from functools import partial
from typing import Protocol

from mega_rl.algorithms.losses import AGGREGATIONS
from mega_rl.algorithms.preferences import TrainingKind
from mega_rl.trainer.assemble.data import RunPrompts
from mega_rl.trainer.assemble.load import LoadedRun
from mega_rl.trainer.given import EvaluateLoss, ExampleSource, FromAnswers, Reference, ReferenceOnce, reference_logprobs
from mega_rl.trainer.loop import Algorithm, BatchSource, Event, Stages, StepLog
from mega_rl.trainer.policy_gradient import MinibatchPlan
from mega_rl.types import JsonObject
from mega_rl.workers.models import LearningWorker


class Batches(BatchSource, Protocol):
    """Source of batches with numbers that a checkpoint keeps."""

    def numbers(self, done: int) -> JsonObject:
        """Return the prompts drawn when `done` steps are done, and which of them have not been trained."""

    def resume(self, numbers: JsonObject) -> None:
        """Resume from the `numbers` of a checkpoint, empty for a new run."""


Parts = tuple[Batches, Algorithm, list[Event]]  # of a run's loop


def build_given(
    kind: TrainingKind, run: LoadedRun, prompts: RunPrompts, stage: Stages, log: StepLog, *, longest: int
) -> Parts:
    """Return batches, algorithm and events of a run that learns from given answers; longest: tokens of a row."""
    roles, trainer = run.roles, run.trainer
    assert isinstance(roles.actor, LearningWorker)
    source = ExampleSource(prompts.order, run.replicas, kind.scores, stage, log)
    by_tokens = kind.form == "answers"
    plan = MinibatchPlan(
        minibatch_size=trainer.minibatch_size,
        epochs=1,
        aggregation=AGGREGATIONS["token-mean" if by_tokens else "seq-mean-token-mean"],
        max_response_tokens=longest,
        seed=trainer.seed,
        ranks=run.replicas,
    )
    reference: Reference | None = None
    if (frozen := roles.reference) is not None:
        held_out = [prompt for one in prompts.held_out for prompt in one.prompts]
        copy = roles.engines.get("reference")  # an adapter's reference is its base
        release = (lambda: 0) if copy is None else copy.offload
        once = ReferenceOnce(frozen, [*prompts.train, *held_out], source, trainer.prompts_per_step, release)
        reference = once if kind.reference == "once" else partial(reference_logprobs, frozen)
    algorithm = FromAnswers(roles.actor, reference, plan, kind.compares, stage, log)
    loss, interval = roles.actor.loss, trainer.val_interval
    evaluate = EvaluateLoss(prompts.held_out, source, algorithm, loss, trainer.steps, interval, by_tokens)
    return source, algorithm, [evaluate]
