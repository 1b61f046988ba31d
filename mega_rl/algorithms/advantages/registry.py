"""Advantage estimators by the name that a recipe chooses."""

from __future__ import annotations

from collections.abc import Callable

from mega_rl.algorithms.advantages.base import AdvantageEstimator
from mega_rl.algorithms.advantages.distillation import Distillation
from mega_rl.algorithms.advantages.gae import GAE
from mega_rl.algorithms.advantages.gdpo import GDPO
from mega_rl.algorithms.advantages.grpo import GRPO
from mega_rl.algorithms.advantages.opo import OPO
from mega_rl.algorithms.advantages.pass_at_k import PassAtK
from mega_rl.algorithms.advantages.reinforce_plus_plus import ReinforcePlusPlus
from mega_rl.algorithms.advantages.reinforce_plus_plus_baseline import ReinforcePlusPlusBaseline
from mega_rl.algorithms.advantages.remax import ReMax
from mega_rl.algorithms.advantages.rloo import RLOO

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
