"""Hints for a run that has nothing to learn from, or whose gradient one token dominates."""

from __future__ import annotations

import logging
from statistics import median

from mega_rl.trainer.step_metrics import EQUAL_GROUPS
from mega_rl.types import Metrics

log = logging.getLogger(__name__)

FLAT_STEPS = 5  # in a row, before the hint
MASKED = "reward/masked_fraction"
SPIKE = 100.0  # times the run's median that an update's gradient norm may be


class AbsentRewards:
    """Hint at the first step in which every response was left out: its update learns nothing."""

    def __init__(self) -> None:
        self._said = False

    def __call__(self, metrics: Metrics) -> None:
        """Take the metrics of one step."""
        if self._said or metrics.get(MASKED) != 1.0:
            return
        self._said = True
        log.info(
            "%s=1: every response of the step was left out, so that there is nothing to learn from; the reward returns "
            "None for all of them%s",
            MASKED,
            " or fails, with reward.pool.on_failure=mask: look at the warnings above" if _failed(metrics) else "",
        )


def _failed(metrics: Metrics) -> bool:
    return any(metrics.get(f"reward/{kind}") for kind in ("timeouts", "crashes", "errors"))


class FlatRewards:
    """Counter of steps in a row that give the policy nothing to prefer; logs one hint.

    All responses to each prompt got the same reward, or no token of the step that trains has an advantage.
    """

    def __init__(self) -> None:
        self._flat = self._idle = 0
        self._said = False

    def __call__(self, metrics: Metrics) -> None:
        """Take the metrics of one step; steps without rewards, or without groups of samples, do not count."""
        self._flat = self._flat + 1 if metrics.get(EQUAL_GROUPS) == 1.0 else 0
        idle = "reward/mean" in metrics and metrics.get("advantage/abs_mean") == 0.0
        self._idle = self._idle + 1 if idle else 0
        if max(self._flat, self._idle) < FLAT_STEPS or self._said:
            return
        self._said = True
        filtered = metrics.get("rollout/filtered_fraction", 0.0)
        if filtered == 1.0:
            log.warning(
                "in each of %d steps no token trains: the length limit cut off every response of this step, and "
                "reward.overlong.filter=true leaves such responses out; raise rollout.max_new_tokens, or take the "
                "filter off",
                FLAT_STEPS,
            )
        elif self._flat < FLAT_STEPS:
            log.warning(
                "in each of %d steps no token that trains has an advantage: the run learns nothing; responses with a "
                "reward above or below the others' are left out (rollout/filtered_fraction=%.3g, %s=%.3g)",
                *(FLAT_STEPS, filtered, MASKED, metrics.get(MASKED, 0.0)),
            )
        else:
            log.info(
                "in each of %d steps all responses to a prompt got the same reward (%.4g on average): there is nothing "
                "to prefer; look at rollouts/ and the reward function, raise rollout.n or rollout.temperature, or take "
                "other prompts",
                *(FLAT_STEPS, metrics["reward/mean"]),
            )


class GradientSpikes:
    """Warning at each step with an update whose gradient norm is a hundred times the run's median."""

    def __init__(self) -> None:
        self._norms: list[float] = []  # mean over the updates of each step

    def __call__(self, metrics: Metrics) -> None:
        """Take the metrics of one step."""
        if "actor/grad_norm_max" not in metrics:
            return
        largest = metrics["actor/grad_norm_max"]
        usual = median(self._norms) if len(self._norms) >= FLAT_STEPS else 0.0
        if largest > SPIKE * usual > 0.0:
            log.warning(
                "an update's gradient norm is %.4g, the run's median is %.4g: a token dominates the update, and "
                "clipping to optim.clip_grad takes the rest of it away; look at actor/ratio_max and at rows of the "
                "embedding that nothing has trained",
                *(largest, usual),
            )
        self._norms.append(metrics["actor/grad_norm"])
