"""The work of steps: the source of batches, and the algorithm that learns from them."""

from __future__ import annotations

from collections.abc import Callable

from mega_rl.config.choices import ADVANTAGE
from mega_rl.config.schema import Config, SuccessCurriculum
from mega_rl.protocols import Ranks
from mega_rl.trainer.assemble.algorithms import (
    build_estimator,
    build_guard,
    build_minibatches,
    build_overlong,
    build_reward_kl,
    build_rules,
)
from mega_rl.trainer.assemble.data import RunPrompts
from mega_rl.trainer.assemble.load import LoadedRun
from mega_rl.trainer.assemble.roles import Roles
from mega_rl.trainer.collect import Collector, SamplingPlan, SuccessMeter
from mega_rl.trainer.loop import Stages, StepLog
from mega_rl.trainer.mismatch import StalenessGuard
from mega_rl.trainer.policy_gradient import Guard, PolicyGradient
from mega_rl.types import Rollout
from mega_rl.workers.ahead import OneStepAhead
from mega_rl.workers.rollout import VocabularyGuard


def build_collector(run: LoadedRun, prompts: RunPrompts, stage: Stages, log: StepLog, *, drawn: int) -> Collector:
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
        log=log,
        watch=watch_samples(config, run.roles, run.world),
        staleness=StalenessGuard(config.trainer.async_steps, run.replicas, current=lambda: sync.weight_version),
        count_data=lambda drawn: order.metrics(drawn) | order.waits(),
        overlong=build_overlong(config),
        success=meter,
    )
    collector.drawn = drawn
    return collector


def watch_samples(config: Config, roles: Roles, everyone: Ranks) -> Callable[[Rollout], None]:
    """Return the function that counts sampled tokens and checks them against every reader's vocabulary.

    With generation ahead the phase is a wait for samples, whose rate means nothing: tokens are not counted then.
    """
    actor = roles.actor_engine
    readers = [roles.engines[role] for role in ("critic", "reference") if role in roles.engines]
    smallest = min(readers, key=lambda engine: engine.sharding.hf.vocab_size, default=actor)
    guard = VocabularyGuard(smallest.sharding.hf.vocab_size, reader=smallest.name, everyone=everyone)
    guards = guard.vocab_size < actor.sharding.hf.vocab_size

    def watch(rollout: Rollout) -> None:
        if guards:
            guard(rollout)
        if not config.trainer.async_steps:
            roles.work.count(float(rollout.loss_mask.sum()) / actor.replica.size)

    return watch


def build_algorithm(run: LoadedRun, stage: Stages, log: StepLog) -> PolicyGradient:
    """Return the algorithm; generation ahead gets its comparison of log-probs."""
    source, sync = run.rollouts.source, run.rollouts.sync
    guard = build_guard(run.config, run.replicas, lambda: sync.weight_version)
    if isinstance(source, OneStepAhead):
        source.compare = lambda sampled: guard(sampled, run.roles.actor.evaluate(sampled))
    return build_policy_gradient(run.config, run.roles, guard, stage, log)


def build_policy_gradient(config: Config, roles: Roles, guard: Guard, stage: Stages, log: StepLog) -> PolicyGradient:
    """Return the policy gradient that the config asks for, over these roles."""
    return PolicyGradient(
        actor=roles.actor,
        critic=roles.critic,
        reference=roles.reference,
        estimator=build_estimator(config),
        minibatches=build_minibatches(config, roles.actor_engine.data_parallel),
        guard=guard,
        reward_kl=build_reward_kl(config, roles.kl),
        kl=roles.kl,
        update_reference=roles.update_reference,
        rules=build_rules(config),
        stage=stage,
        log=log,
    )
