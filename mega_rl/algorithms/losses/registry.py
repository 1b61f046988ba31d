"""Policy losses by the name that a recipe chooses."""

from __future__ import annotations

from collections.abc import Callable

from mega_rl.algorithms.losses.base import PolicyObjective
from mega_rl.algorithms.losses.ppo import PPO

# Called with the settings of the recipe; names and settings as in `mega_rl.config.schema.algorithms.LOSSES`.
OBJECTIVES: dict[str, Callable[..., PolicyObjective]] = {"ppo": PPO}
