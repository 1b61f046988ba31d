"""Policy losses by the name that a recipe chooses."""

from __future__ import annotations

from collections.abc import Callable

from mega_rl.algorithms.losses.base import PolicyObjective
from mega_rl.algorithms.losses.cispo import CISPO
from mega_rl.algorithms.losses.covariance import ClipCov, KLCov
from mega_rl.algorithms.losses.distillation import TeacherDivergence
from mega_rl.algorithms.losses.dppo import DPPOKL, DPPOTV
from mega_rl.algorithms.losses.gmpo import GMPO
from mega_rl.algorithms.losses.gspo import GSPO
from mega_rl.algorithms.losses.ppo import PPO
from mega_rl.algorithms.losses.sapo import SAPO

# Called with the settings of the recipe; names and settings as in `mega_rl.config.schema.algorithms.LOSSES`.
OBJECTIVES: dict[str, Callable[..., PolicyObjective]] = {
    "ppo": PPO,
    "gspo": GSPO,
    "gmpo": GMPO,
    "cispo": CISPO,
    "sapo": SAPO,
    "dppo_tv": DPPOTV,
    "dppo_kl": DPPOKL,
    "clip_cov": ClipCov,
    "kl_cov": KLCov,
    "distillation": TeacherDivergence,
}
