"""Hints for a run whose rewards give it nothing to learn from."""

from __future__ import annotations

import logging

from mega_rl.trainer.step_metrics import EQUAL_GROUPS
from mega_rl.types import Metrics

log = logging.getLogger(__name__)

FLAT_STEPS = 5  # in a row, before the hint
MASKED = "reward/masked_fraction"


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
    """Counter of steps in a row in which all responses to each prompt got the same reward; logs one hint."""

    def __init__(self) -> None:
        self._steps = 0
        self._said = False

    def __call__(self, metrics: Metrics) -> None:
        """Take the metrics of one step; steps without groups of samples do not count."""
        self._steps = self._steps + 1 if metrics.get(EQUAL_GROUPS) == 1.0 else 0
        if self._steps < FLAT_STEPS or self._said:
            return
        self._said = True
        log.info(
            "in each of %d steps all responses to a prompt got the same reward (%.4g on average): there is nothing to "
            "prefer; look at rollouts/ and the reward function, raise rollout.n or rollout.temperature, or take other "
            "prompts",
            FLAT_STEPS,
            metrics["reward/mean"],
        )
