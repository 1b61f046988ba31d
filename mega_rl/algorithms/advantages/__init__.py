"""Advantage estimators by the name that a recipe chooses.

A new one is a class in `groups` or `returns`, its settings in `mega_rl.config.schema.algorithms` and a line in both
tables.
"""

from __future__ import annotations

from collections.abc import Callable

from mega_rl.algorithms.advantages.base import AdvantageEstimator
from mega_rl.algorithms.advantages.groups import GDPO, GRPO, OPO, RLOO, PassAtK
from mega_rl.algorithms.advantages.returns import GAE, Distillation, ReinforcePlusPlus, ReinforcePlusPlusBaseline, ReMax

# Called with the settings of the recipe; names and settings as in `mega_rl.config.schema.algorithms.ADVANTAGES`.
ESTIMATORS: dict[str, Callable[..., AdvantageEstimator]] = {
    "gae": GAE,
    "grpo": GRPO,
    "gdpo": GDPO,
    "rloo": RLOO,
    "reinforce_plus_plus": ReinforcePlusPlus,
    "reinforce_plus_plus_baseline": ReinforcePlusPlusBaseline,
    "remax": ReMax,
    "opo": OPO,
    "pass_at_k": PassAtK,
    "distillation": Distillation,
}
