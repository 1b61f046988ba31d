"""The algorithm of a run by its settings: estimator, losses, correction, KL, mini-batches, limits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict
from functools import partial

from mega_rl.algorithms.inputs import AdvantageEstimator
from mega_rl.algorithms.kl import KL_ESTIMATORS, KLController, RewardKL
from mega_rl.algorithms.losses.aggregation import AGGREGATIONS
from mega_rl.algorithms.losses.tokens import Correction, PolicyObjective
from mega_rl.config.choices import ADVANTAGE, CORRECTION, LOSS, chosen, corrects
from mega_rl.config.needs import is_on_policy
from mega_rl.config.schema import Config, KlConfig
from mega_rl.ddp.optimizer import learning_rate
from mega_rl.protocols import ModelPasses, Ranks
from mega_rl.trainer.filters import Overlong
from mega_rl.trainer.mismatch import MismatchGuard, usual_limits
from mega_rl.trainer.policy_gradient import MinibatchPlan, PolicyGradientRules
from mega_rl.workers.models import LearningWorker, Lessons, PolicyLoss, RoleMeter, ValueLoss

log = logging.getLogger(__name__)


def build_estimator(config: Config) -> AdvantageEstimator:
    """Return the advantage estimator that the recipe chooses. Raises UserError as `Choice.build` does."""
    estimator: AdvantageEstimator = ADVANTAGE.build(config)
    return estimator


def build_objective(config: Config) -> PolicyObjective:
    """Return the policy loss that the recipe chooses. Raises UserError as `Choice.build` does."""
    objective: PolicyObjective = LOSS.build(config)
    return objective


def build_correction(config: Config) -> Correction | None:
    """Return the correction that the recipe chooses, None for none. Raises UserError as `Choice.build` does."""
    if config.algorithm.correction.name == "auto":
        log.info("algorithm.correction=auto takes %s", chosen(config, CORRECTION))
    return CORRECTION.build(config) if corrects(config) else None


def build_reward_kl(config: Config, controller: KLController) -> RewardKL | None:
    """Return the KL penalty in token rewards; None without one."""
    kl = config.algorithm.kl
    return RewardKL(controller, KL_ESTIMATORS[kl.estimator]) if kl.name == "reward" else None


def build_kl(kl: KlConfig) -> KLController:
    """Return the controller of the KL coefficient."""
    return KLController(kl.coef, kl.target if kl.control == "adaptive" else None, kl.horizon)


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
    rate = _learning_rate(config, config.optim.lr, steps=config.trainer.steps - first_step)
    return LearningWorker("actor", engine, loss, rate, first_step, skipped, lessons, meter)


def build_critic_role(config: Config, engine: ModelPasses, meter: RoleMeter | None = None) -> LearningWorker:
    """Return the role of the critic on its engine."""
    loss, skipped = ValueLoss(value_clip=config.algorithm.value_clip), config.optim.max_skipped_steps
    rate = _learning_rate(config, config.optim.critic_lr, steps=config.trainer.steps)
    return LearningWorker("critic", engine, loss, rate, max_skipped_steps=skipped, meter=meter)


def _learning_rate(config: Config, peak: float, *, steps: int) -> Callable[[int], float]:
    """Return the learning rate by step of a role that learns in the last `steps` steps."""
    return partial(learning_rate, peak=peak, optim=config.optim, total_steps=steps)


def build_rules(config: Config) -> PolicyGradientRules:
    """Return the choices of a policy gradient.

    A single on-policy update takes the old log-probs from its own forward.
    """
    return PolicyGradientRules(
        recompute_old_logprobs=not (config.algorithm.old_logprobs == "rollout" or is_on_policy(config)),
        filter_truncated=config.reward.overlong.filter,
        skip_zero_advantages=config.trainer.microbatch.skip_zero_advantages,
    )


def build_overlong(config: Config) -> Overlong:
    """Return the treatment of responses that reach the length limit."""
    return Overlong(config.rollout.max_new_tokens, **asdict(config.reward.overlong))


def build_minibatches(config: Config, ranks: Ranks) -> MinibatchPlan:
    """Return how a step's batch is cut."""
    return MinibatchPlan(
        minibatch_size=config.trainer.minibatch_size,
        epochs=config.algorithm.epochs,
        aggregation=AGGREGATIONS[config.algorithm.loss_aggregation],
        max_response_tokens=config.rollout.max_new_tokens,
        seed=config.trainer.seed,
        ranks=ranks,
    )


def build_guard(config: Config, ranks: Ranks, version: Callable[[], int]) -> MismatchGuard:
    """Return the comparison of the sampler's log-probs with the trainer's; version: of the published weights."""
    rollout = config.rollout
    limits = usual_limits(
        in_fp32=config.model.dtype == "fp32" and rollout.dtype in ("auto", "fp32"),
        mean=rollout.mismatch.mean_limit,
        share=rollout.mismatch.share_limit,
        largest=rollout.mismatch.max_limit,
    )
    return MismatchGuard(limits, ranks, current=version if config.trainer.async_steps else None)
