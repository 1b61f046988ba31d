"""One line for a run whose rewards give it nothing to learn from."""

from __future__ import annotations

import logging

from mega_rl.trainer.report import EQUAL_GROUPS
from mega_rl.types import Metrics

log = logging.getLogger(__name__)

FLAT_STEPS = 5  # in a row, before the hint


class FlatRewards:
    """Counts steps in a row in which the responses to a prompt all got the same reward, and says so once."""

    def __init__(self) -> None:
        self._steps = 0
        self._said = False

    def __call__(self, metrics: Metrics) -> None:
        """Take the metrics of one step; those without groups are of no run that this is about."""
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
