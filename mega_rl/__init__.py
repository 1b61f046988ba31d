"""PPO and GRPO post-training of language models on NVIDIA Megatron-Core.

The names in `__all__` are the Python interface, described in docs/python.md. Importing the package imports no torch:
each name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mega_rl.api import Outcome, Trainer, build_trainer, load_config, train
    from mega_rl.config.schema import Config
    from mega_rl.errors import RunError, UserError

__version__ = "0.1.0"

__all__ = [
    "Config",
    "Outcome",
    "RunError",
    "Trainer",
    "UserError",
    "__version__",
    "build_trainer",
    "load_config",
    "train",
]

_MODULES = {
    "Config": "mega_rl.config.schema",
    "RunError": "mega_rl.errors",
    "UserError": "mega_rl.errors",
    **dict.fromkeys(("Outcome", "Trainer", "build_trainer", "load_config", "train"), "mega_rl.api"),
}


def __getattr__(name: str) -> Any:
    """Import a name of the interface at its first use."""
    if name not in _MODULES:
        raise AttributeError(f"module 'mega_rl' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
