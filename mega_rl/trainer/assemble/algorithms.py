"""The work of steps: the source of batches, the algorithm, and their meter."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mega_rl.algorithms.inputs import AdvantageEstimator
from mega_rl.algorithms.kl import KL_ESTIMATORS, KLController
from mega_rl.algorithms.losses import AGGREGATIONS, Correction, PolicyObjective
from mega_rl.config.choices import (
    ADVANTAGE,
    CORRECTION,
    LOSS,
    chosen,
    corrects,
    is_sampled,
    reads_reference,
)
from mega_rl.config.needs import is_on_policy
from mega_rl.config.schema import (
    AlgorithmConfig,
    Config,
    OptimConfig,
    OverlongConfig,
    RolloutConfig,
    SuccessCurriculum,
    TrainerConfig,
)
from mega_rl.config.setting import Kind
from mega_rl.ddp.optimizer import learning_rate
from mega_rl.errors import UserError
from mega_rl.parallel.accelerator import Accelerator
from mega_rl.parallel.accelerator.base import resident_bytes
from mega_rl.protocols import ModelPasses
from mega_rl.tracking.metrics.flops import peak_flops
from mega_rl.tracking.metrics.steps import PhaseTimer, StepMeter, StepTraces
from mega_rl.trainer.assemble.data import RunPrompts
from mega_rl.trainer.collect import Collector, SamplingPlan, SuccessMeter
from mega_rl.trainer.loop import Event, Stages, StepLog
from mega_rl.trainer.mismatch import MismatchGuard, Rescoring, StalenessGuard, usual_limits
from mega_rl.trainer.policy_gradient import Guard, MinibatchPlan, PolicyGradient, PolicyGradientRules
from mega_rl.trainer.selection import AtOnce, StepVersions, Stock
from mega_rl.types import Rollout
from mega_rl.workers.models import GivenLoss, LearningWorker, Lessons, PolicyLoss, RoleMeter, ValueLoss

if TYPE_CHECKING:
    from mega_rl.trainer.assemble.load import LoadedRun
    from mega_rl.trainer.assemble.plan import Roles

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Method:
    """The algorithm of a run: its parts as the recipe names them, and what they need."""

    settings: AlgorithmConfig
    estimator: AdvantageEstimator
    objective: PolicyObjective
    correction: Correction | None  # weights of token losses, from the probabilities of the sampler
    on_policy: bool  # see `config.needs.is_on_policy`
    reads_reference: bool
    needs_teacher: bool
    needs_parts: bool
    needs_greedy: bool

    def reward_kl(self, controller: KLController) -> KLController | None:
        """Return the controller if its penalty is in token rewards."""
        return controller if self.settings.kl.name == "reward" else None


def choose_method(config: Config) -> Method:
    """Return the algorithm that a recipe chooses. Raises UserError as `Choice.build` does."""
    if config.algorithm.correction.name == "auto" and is_sampled(config):
        log.info("algorithm.correction=auto takes %s", chosen(config, CORRECTION))
    return Method(
        config.algorithm,
        estimator=cast("AdvantageEstimator", ADVANTAGE.build(config)),
        objective=cast("PolicyObjective", LOSS.build(config)),
        correction=CORRECTION.build(config) if corrects(config) else None,
        on_policy=is_on_policy(config),
        reads_reference=reads_reference(config),
        needs_teacher=LOSS.needs(config, "needs_teacher"),
        needs_parts=ADVANTAGE.needs(config, "needs_parts"),
        needs_greedy=ADVANTAGE.needs(config, "needs_greedy"),
    )


def build_actor_role(
    method: Method,
    optim: OptimConfig,
    engine: ModelPasses,
    kl: KLController,
    *,
    total_steps: int,
    lessons: Lessons | None = None,
    meter: RoleMeter | None = None,
) -> LearningWorker:
    """Return the role of the policy on its engine; it learns after the critic's warm-up."""
    algorithm, objective = method.settings, method.objective
    kind: Any = algorithm.kind
    loss: PolicyLoss | GivenLoss = (
        GivenLoss(kind)
        if kind.form != "prompts"
        else PolicyLoss(
            objective,
            kl=kl if algorithm.kl.name == "loss" else None,
            kl_estimator=KL_ESTIMATORS[algorithm.kl.estimator],
            entropy_coef=algorithm.entropy_coef,
            drift_coef=getattr(objective, "drift_coef", 0.0),
            correction=method.correction,
            on_policy=method.on_policy,
        )
    )
    first = algorithm.critic_warmup_steps
    rate = partial(learning_rate, peak=optim.lr, optim=optim, total_steps=total_steps - first)
    return LearningWorker("actor", engine, loss, rate, first, optim.max_skipped_steps, lessons, meter)


def build_critic_role(
    method: Method, optim: OptimConfig, engine: ModelPasses, *, total_steps: int, meter: RoleMeter | None = None
) -> LearningWorker:
    """Return the role of the critic on its engine."""
    loss = ValueLoss(value_clip=method.settings.value_clip)
    rate = partial(learning_rate, peak=optim.critic_lr, optim=optim, total_steps=total_steps)
    return LearningWorker("critic", engine, loss, rate, max_skipped_steps=optim.max_skipped_steps, meter=meter)


def build_meter(run: LoadedRun, accelerator: Accelerator, *, in_bf16: bool, scores: bool, done: int) -> StepMeter:
    """Return the meter of steps; it has traces if this rank writes them.

    in_bf16: training. scores: the run has rewards.
    """
    profile, rank = run.trainer.profile, run.world.rank
    if profile.memory and accelerator.name != "cuda":
        raise UserError(
            "trainer.profile.memory=true: there is no GPU, whose allocator has the history; set it to false"
        )
    traces = None
    if profile.steps and rank in profile.ranks:
        folder = Path(run.trainer.run_dir) / "profile"
        steps = [step for step in profile.steps if step <= run.trainer.steps]
        traces = StepTraces(folder, steps=steps, rank=rank, memory=profile.memory)
    return StepMeter(
        PhaseTimer(synchronize=accelerator.synchronize),
        run.roles.work,
        ranks=run.world,
        peak_flops=1e12 * profile.peak_tflops or (peak_flops(accelerator.model) if in_bf16 else None),
        peak_memory=lambda: {**accelerator.take_peak_memory(), "host": resident_bytes()},
        traces=traces,
        step=done,
        scores=scores,
    )


def build_collector(
    run: LoadedRun, prompts: RunPrompts, rollout: RolloutConfig, success: Kind, overlong: OverlongConfig,
    stage: Stages, step_log: StepLog,
) -> Collector:  # fmt: skip
    """Return the source of a step's samples; success: data.curriculum."""
    order, stock, method, trainer = prompts.order, run.rollouts.stock, run.roles.method, run.trainer
    versions = StepVersions(0, lambda: run.rollouts.sync.weight_version) if stock is None else stock.versions
    dynamic, per_step = rollout.dynamic_sampling, trainer.prompts_per_step
    meter = None
    if prompts.rates is not None and isinstance(success, SuccessCurriculum):
        meter = SuccessMeter(prompts.rates, success.right_above, success.right_part)

    def count(rollout: Rollout) -> None:
        """Count sampled tokens, unless generation ahead makes the phase a wait."""
        if not trainer.async_steps:
            run.roles.work.count(float(rollout.loss_mask.sum()) / run.roles.actor_engine.replica.size)

    return Collector(
        order=order,
        source=run.rollouts.source,
        rewards=run.scorer,
        plan=SamplingPlan(
            samples=rollout.n,
            waves=dynamic.max_generations,
            prompts_per_step=per_step,
            prompts=dynamic.prompts or per_step,
            by_parts=method.needs_parts,
            greedy=method.needs_greedy,
            ahead=trainer.async_steps,
            steps=0 if dynamic.max_generations else trainer.steps,
            overlong=overlong,
            max_response_tokens=rollout.max_new_tokens,
        ),
        ranks=run.replicas,
        stage=stage,
        log=step_log,
        watch=count,
        staleness=StalenessGuard(versions, run.replicas),
        success=meter,
        stock=stock or (Stock(AtOnce(run.rollouts.source)) if dynamic.max_generations else None),
    )


def build_algorithm(
    run: LoadedRun, rollout: RolloutConfig, overlong: OverlongConfig, stage: Stages, step_log: StepLog
) -> tuple[PolicyGradient, list[Event]]:
    """Return the algorithm, and what generation ahead needs around its steps to compare log-probs."""
    stream, changes = run.rollouts.stream, run.rollouts.changes
    limits, samples_all = usual_limits(rollout.mismatch, in_fp32=run.in_fp32), rollout.top_p == 1 and not rollout.top_k
    guard = MismatchGuard(limits, run.replicas, changes, samples_all)
    algorithm = build_policy_gradient(
        run.roles, run.trainer, guard, stage, step_log,
        max_response_tokens=rollout.max_new_tokens, filter_truncated=overlong.filter,
    )  # fmt: skip
    if stream is None or changes is None:
        return algorithm, []
    publish = partial(stream.publish_within, stage.publish)
    algorithm.rules = replace(algorithm.rules, interval=rollout.sglang.sync.interval, publish=publish)
    rescoring = Rescoring(
        run.roles.actor, guard, changes, stream.newest, rollout.verify_interval,
        algorithm.rules.recompute_old_logprobs, stage, step_log,
    )  # fmt: skip
    return algorithm, [rescoring]


def build_policy_gradient(
    roles: Roles, trainer: TrainerConfig, guard: Guard, stage: Stages, step_log: StepLog,
    *, max_response_tokens: int, filter_truncated: bool,
) -> PolicyGradient:  # fmt: skip
    """Return the policy gradient over these roles."""
    method, algorithm = roles.method, roles.method.settings
    return PolicyGradient(
        actor=roles.actor,
        critic=roles.critic,
        reference=roles.reference,
        estimator=method.estimator,
        minibatches=MinibatchPlan(
            minibatch_size=trainer.minibatch_size,
            epochs=algorithm.epochs,
            aggregation=AGGREGATIONS[algorithm.loss_aggregation],
            max_response_tokens=max_response_tokens,
            seed=trainer.seed,
            ranks=roles.actor_engine.data_parallel,
        ),
        guard=guard,
        reward_kl=method.reward_kl(roles.kl),
        kl=roles.kl,
        update_reference=roles.update_reference,
        rules=PolicyGradientRules(
            # A single on-policy update takes the old log-probs from its own forward.
            recompute_old_logprobs=not (algorithm.old_logprobs == "rollout" or method.on_policy),
            filter_truncated=filter_truncated,
            last_turn=algorithm.train_turns == "last",
        ),
        stage=stage,
        log=step_log,
    )
