"""Post-training of language models by reinforcement learning on NVIDIA Megatron-Core.

The names in `__all__` are the Python interface, described in docs/python.md. Importing the package imports no torch:
each name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mega_rl.agents.chat import ToolsEnvironment
    from mega_rl.agents.environment import Environment, Policy
    from mega_rl.agents.gateway import Gateway
    from mega_rl.agents.nemo_gym import NemoGym
    from mega_rl.agents.remote import RemoteEnvironment
    from mega_rl.agents.tool_servers import McpServer
    from mega_rl.agents.trajectory import Branch, LimitReached, Trajectory, Turn
    from mega_rl.agents.verifiers import Verifiers
    from mega_rl.algorithms.inputs import AdvantageInputs
    from mega_rl.algorithms.losses import PolicyTokens, SampledTokens
    from mega_rl.api import (
        Outcome,
        Trainer,
        load_config,
        register_advantage,
        register_correction,
        register_data_source,
        register_loss,
        register_rollout_source,
        train,
        train_together,
    )
    from mega_rl.config.schema import Config
    from mega_rl.data.rows import DataContext
    from mega_rl.errors import RunError, UserError
    from mega_rl.protocols import RolloutSource
    from mega_rl.tracking.progress import show_progress
    from mega_rl.types import Prompt, Rollout
    from mega_rl.workers.rollout import RolloutContext

__version__ = "0.1.0"

_NAMES = {
    "mega_rl.agents.chat": "ToolsEnvironment",
    "mega_rl.agents.environment": "Environment Policy",
    "mega_rl.agents.gateway": "Gateway",
    "mega_rl.agents.nemo_gym": "NemoGym",
    "mega_rl.agents.remote": "RemoteEnvironment",
    "mega_rl.agents.tool_servers": "McpServer",
    "mega_rl.agents.verifiers": "Verifiers",
    "mega_rl.agents.trajectory": "Branch LimitReached Trajectory Turn",
    "mega_rl.algorithms.inputs": "AdvantageInputs",
    "mega_rl.algorithms.losses": "PolicyTokens SampledTokens",
    "mega_rl.api": "Outcome Trainer load_config register_advantage register_correction register_data_source "
    "register_loss register_rollout_source train train_together",
    "mega_rl.config.schema": "Config",
    "mega_rl.data.rows": "DataContext",
    "mega_rl.errors": "RunError UserError",
    "mega_rl.protocols": "RolloutSource",
    "mega_rl.tracking.progress": "show_progress",
    "mega_rl.types": "Prompt Rollout",
    "mega_rl.workers.rollout": "RolloutContext",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = ["__version__", *_MODULES]


def __getattr__(name: str) -> Any:
    """Import a name of the interface at its first use."""
    if name not in _MODULES:
        raise AttributeError(f"module 'mega_rl' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
