"""Advantage estimators by the name that a recipe chooses."""

from __future__ import annotations

from collections.abc import Callable

from mega_rl.algorithms.advantages.base import AdvantageEstimator
from mega_rl.algorithms.advantages.gae import GAE
from mega_rl.algorithms.advantages.grpo import GRPO

# Called with the settings of the recipe; names and settings as in `mega_rl.config.schema.algorithms.ADVANTAGES`.
ESTIMATORS: dict[str, Callable[..., AdvantageEstimator]] = {"gae": GAE, "grpo": GRPO}
