"""The work of steps: the source of batches, and the algorithm that learns from them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, cast

from mega_rl.algorithms.inputs import AdvantageEstimator
from mega_rl.algorithms.kl import KL_ESTIMATORS, KLController, RewardKL
from mega_rl.algorithms.losses import AGGREGATIONS, Correction, PolicyObjective
from mega_rl.config.choices import ADVANTAGE, CORRECTION, LOSS, chosen, corrects
from mega_rl.config.needs import is_on_policy
from mega_rl.config.schema import Config, KlConfig, SuccessCurriculum
from mega_rl.ddp.optimizer import learning_rate
from mega_rl.protocols import ModelPasses
from mega_rl.trainer.assemble.data import RunPrompts
from mega_rl.trainer.collect import Collector, SamplingPlan, SuccessMeter
from mega_rl.trainer.loop import Stages, StepLog
from mega_rl.trainer.mismatch import MismatchGuard, StalenessGuard, usual_limits
from mega_rl.trainer.policy_gradient import Guard, MinibatchPlan, PolicyGradient, PolicyGradientRules
from mega_rl.trainer.rows import Overlong
from mega_rl.types import Rollout
from mega_rl.workers.ahead import OneStepAhead
from mega_rl.workers.models import LearningWorker, Lessons, PolicyLoss, RoleMeter, ValueLoss
from mega_rl.workers.rollout import check_vocabulary

if TYPE_CHECKING:
    from mega_rl.trainer.assemble.load import LoadedRun
    from mega_rl.trainer.assemble.plan import Roles

log = logging.getLogger(__name__)


def build_estimator(config: Config) -> AdvantageEstimator:
    """Return the advantage estimator that the recipe chooses. Raises UserError as `Choice.build` does."""
    return cast("AdvantageEstimator", ADVANTAGE.build(config))


def build_objective(config: Config) -> PolicyObjective:
    """Return the policy loss that the recipe chooses. Raises UserError as `Choice.build` does."""
    return cast("PolicyObjective", LOSS.build(config))


def build_correction(config: Config) -> Correction | None:
    """Return the correction that the recipe chooses, None for none. Raises UserError as `Choice.build` does."""
    if config.algorithm.correction.name == "auto":
        log.info("algorithm.correction=auto takes %s", chosen(config, CORRECTION))
    return CORRECTION.build(config) if corrects(config) else None


def build_reward_kl(kl: KlConfig, controller: KLController) -> RewardKL | None:
    """Return the KL penalty in token rewards; None without one."""
    return RewardKL(controller, KL_ESTIMATORS[kl.estimator]) if kl.name == "reward" else None


def build_actor_role(
    config: Config,
    engine: ModelPasses,
    kl: KLController,
    lessons: Lessons | None = None,
    meter: RoleMeter | None = None,
) -> LearningWorker:
    """Return the role of the policy on its engine; it learns after the critic's warm-up."""
    algorithm, objective = config.algorithm, build_objective(config)
    loss = PolicyLoss(
        objective,
        kl=kl if algorithm.kl.name == "loss" else None,
        kl_estimator=KL_ESTIMATORS[algorithm.kl.estimator],
        entropy_coef=algorithm.entropy_coef,
        drift_coef=getattr(objective, "drift_coef", 0.0),
        correction=build_correction(config),
        on_policy=is_on_policy(config),
    )
    first_step, skipped = algorithm.critic_warmup_steps, config.optim.max_skipped_steps
    steps = config.trainer.steps - first_step
    rate = partial(learning_rate, peak=config.optim.lr, optim=config.optim, total_steps=steps)
    return LearningWorker("actor", engine, loss, rate, first_step, skipped, lessons, meter)


def build_critic_role(config: Config, engine: ModelPasses, meter: RoleMeter | None = None) -> LearningWorker:
    """Return the role of the critic on its engine."""
    loss, optim = ValueLoss(value_clip=config.algorithm.value_clip), config.optim
    rate = partial(learning_rate, peak=optim.critic_lr, optim=optim, total_steps=config.trainer.steps)
    return LearningWorker("critic", engine, loss, rate, max_skipped_steps=optim.max_skipped_steps, meter=meter)


def build_overlong(config: Config) -> Overlong:
    """Return the treatment of responses that reach the length limit."""
    return Overlong(config.rollout.max_new_tokens, **asdict(config.reward.overlong))


def build_collector(run: LoadedRun, prompts: RunPrompts, stage: Stages, step_log: StepLog, *, drawn: int) -> Collector:
    """Return the source of a step's samples; drawn: prompts before the run begins."""
    config, order, sync = run.config, prompts.order, run.rollouts.sync
    success, dynamic = config.data.curriculum, config.rollout.dynamic_sampling
    per_step = config.trainer.prompts_per_step
    meter = None
    if prompts.rates is not None and isinstance(success, SuccessCurriculum):
        meter = SuccessMeter(prompts.rates, success.right_above, success.right_part)
    collector = Collector(
        order=order,
        source=run.rollouts.source,
        rewards=run.scorer,
        plan=SamplingPlan(
            samples=config.rollout.n,
            waves=dynamic.max_generations,
            prompts_per_step=per_step,
            prompts=dynamic.prompts or per_step,
            by_parts=ADVANTAGE.needs(config, "needs_parts"),
            greedy=ADVANTAGE.needs(config, "needs_greedy"),
        ),
        ranks=run.replicas,
        stage=stage,
        log=step_log,
        watch=_watch_samples(run),
        staleness=StalenessGuard(config.trainer.async_steps, run.replicas, current=lambda: sync.weight_version),
        count_data=lambda drawn: order.metrics(drawn) | order.waits(),
        overlong=build_overlong(config),
        success=meter,
    )
    collector.drawn = drawn
    return collector


def _watch_samples(run: LoadedRun) -> Callable[[Rollout], None]:
    """Return the function that counts sampled tokens and checks them against every reader's vocabulary.

    With generation ahead the phase is a wait for samples, whose rate means nothing: tokens are not counted then.
    """
    roles, counts = run.roles, not run.config.trainer.async_steps
    actor = roles.actor_engine
    readers = [roles.engines[role] for role in ("critic", "reference") if role in roles.engines]
    smallest = min((actor, *readers), key=lambda engine: engine.sharding.hf.vocab_size)

    def watch(rollout: Rollout) -> None:
        if smallest is not actor:
            check_vocabulary(rollout, smallest.sharding.hf.vocab_size, reader=smallest.name, everyone=run.world)
        if counts:
            roles.work.count(float(rollout.loss_mask.sum()) / actor.replica.size)

    return watch


def build_algorithm(run: LoadedRun, stage: Stages, step_log: StepLog) -> PolicyGradient:
    """Return the algorithm; generation ahead gets its comparison of log-probs."""
    config, source, sync = run.config, run.rollouts.source, run.rollouts.sync
    rollout, settings = config.rollout, config.rollout.mismatch
    in_fp32 = config.model.dtype == "fp32" and rollout.dtype in ("auto", "fp32")
    limits = usual_limits(
        in_fp32=in_fp32, mean=settings.mean_limit, share=settings.share_limit, largest=settings.max_limit
    )
    current = (lambda: sync.weight_version) if config.trainer.async_steps else None
    guard = MismatchGuard(limits, run.replicas, current=current)
    if isinstance(source, OneStepAhead):
        source.compare = lambda sampled: guard(sampled, run.roles.actor.evaluate(sampled))
    return build_policy_gradient(config, run.roles, guard, stage, step_log)


def build_policy_gradient(
    config: Config, roles: Roles, guard: Guard, stage: Stages, step_log: StepLog
) -> PolicyGradient:
    """Return the policy gradient that the config asks for, over these roles."""
    algorithm, trainer = config.algorithm, config.trainer
    return PolicyGradient(
        actor=roles.actor,
        critic=roles.critic,
        reference=roles.reference,
        estimator=build_estimator(config),
        minibatches=MinibatchPlan(
            minibatch_size=trainer.minibatch_size,
            epochs=algorithm.epochs,
            aggregation=AGGREGATIONS[algorithm.loss_aggregation],
            max_response_tokens=config.rollout.max_new_tokens,
            seed=trainer.seed,
            ranks=roles.actor_engine.data_parallel,
        ),
        guard=guard,
        reward_kl=build_reward_kl(algorithm.kl, roles.kl),
        kl=roles.kl,
        update_reference=roles.update_reference,
        rules=PolicyGradientRules(
            # A single on-policy update takes the old log-probs from its own forward.
            recompute_old_logprobs=not (algorithm.old_logprobs == "rollout" or is_on_policy(config)),
            filter_truncated=config.reward.overlong.filter,
            skip_zero_advantages=trainer.microbatch.skip_zero_advantages,
        ),
        stage=stage,
        log=step_log,
    )
