"""Sources of prompts, rollouts and rewards of a step, joined where one goes by another."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

from mega_rl.assemble.prompts.order import PromptOrder
from mega_rl.config.plugins.choices import ADVANTAGE
from mega_rl.config.schema import Config
from mega_rl.protocols import Ranks, RolloutSource, Scorer
from mega_rl.trainer.dynamic_sampling import DynamicSampling, SamplingPlan
from mega_rl.trainer.loop import PromptSource
from mega_rl.trainer.order.measuring import MeasuredSuccess


class StepSampling(NamedTuple):
    """Parts of the trainer that draw prompts, sample and score."""

    prompts: PromptSource
    rollout: RolloutSource
    reward: Scorer


def step_sampling(
    config: Config,
    order: PromptOrder,
    rollout: RolloutSource,
    reward: Scorer,
    *,
    ranks: Ranks,
    phase: Callable[[str], AbstractContextManager[None]],
    drawn: int,
) -> StepSampling:
    """Return the parts of a step's sampling: with dynamic sampling one object is all three.

    ranks: the data-parallel replicas. drawn: prompts, since the run began.
    """
    success = config.data.curriculum.success
    if order.rates is not None:
        rollout = reward = MeasuredSuccess(
            rollout, reward, order.rates, ranks, right_above=success.right_above, right_part=success.right_part
        )
    settings, per_step = config.rollout.dynamic_sampling, config.trainer.prompts_per_step
    if not settings.max_generations:
        return StepSampling(order.steps, rollout, reward)
    plan = SamplingPlan(
        per_step,
        settings.prompts or per_step,
        settings.max_generations,
        by_parts=ADVANTAGE.needs(config, "needs_parts"),
    )
    dynamic = DynamicSampling(order.steps.take, rollout, reward, ranks, phase, plan, drawn)
    return StepSampling(dynamic, dynamic, dynamic)
