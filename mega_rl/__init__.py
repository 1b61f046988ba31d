"""Post-training of language models by reinforcement learning on NVIDIA Megatron-Core.

The names in `__all__` are the Python interface, described in docs/python.md. Importing the package imports no torch:
each name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mega_rl.algorithms.inputs import AdvantageInputs
    from mega_rl.algorithms.losses.tokens import PolicyTokens, SampledTokens
    from mega_rl.api import (
        Outcome,
        Trainer,
        build_trainer,
        load_config,
        register_advantage,
        register_correction,
        register_data_source,
        register_loss,
        register_rollout_source,
        train,
    )
    from mega_rl.config.schema import Config
    from mega_rl.data.rows import DataContext
    from mega_rl.errors import RunError, UserError
    from mega_rl.protocols import RolloutSource
    from mega_rl.tracking.progress import show_progress
    from mega_rl.types import Prompt, Rollout
    from mega_rl.workers.own_rollouts import RolloutContext, Trajectory

__version__ = "0.1.0"

__all__ = [
    "AdvantageInputs",
    "Config",
    "DataContext",
    "Outcome",
    "PolicyTokens",
    "Prompt",
    "Rollout",
    "RolloutContext",
    "RolloutSource",
    "RunError",
    "SampledTokens",
    "Trainer",
    "Trajectory",
    "UserError",
    "__version__",
    "build_trainer",
    "load_config",
    "register_advantage",
    "register_correction",
    "register_data_source",
    "register_loss",
    "register_rollout_source",
    "show_progress",
    "train",
]

_OF_API = (
    "Outcome", "Trainer", "build_trainer", "load_config", "register_advantage", "register_correction",
    "register_data_source", "register_loss", "register_rollout_source", "train",
)  # fmt: skip
_MODULES = {
    "AdvantageInputs": "mega_rl.algorithms.inputs",
    "PolicyTokens": "mega_rl.algorithms.losses.tokens",
    "SampledTokens": "mega_rl.algorithms.losses.tokens",
    "Config": "mega_rl.config.schema",
    "DataContext": "mega_rl.data.rows",
    "RolloutSource": "mega_rl.protocols",
    **dict.fromkeys(("Prompt", "Rollout"), "mega_rl.types"),
    **dict.fromkeys(("RolloutContext", "Trajectory"), "mega_rl.workers.own_rollouts"),
    "RunError": "mega_rl.errors",
    "UserError": "mega_rl.errors",
    "show_progress": "mega_rl.tracking.progress",
    **dict.fromkeys(_OF_API, "mega_rl.api"),
}


def __getattr__(name: str) -> Any:
    """Import a name of the interface at its first use."""
    if name not in _MODULES:
        raise AttributeError(f"module 'mega_rl' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
