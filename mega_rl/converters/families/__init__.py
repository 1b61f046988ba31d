"""The registry of model families by `model_type` of config.json: every `Family` of these modules.

Adding one takes its entry in a module of this folder and its line of test data: docs/converters.md.
"""

from __future__ import annotations

from mega_rl.converters.families import (
    deepseek,
    dense,
    gemma,
    glm,
    gpt_oss,
    moe,
    norms_after,
    qwen_next,
    sigmoid,
    small_rules,
)
from mega_rl.converters.families.base import Family, KnownBug

__all__ = ["FAMILIES", "Family", "KnownBug"]

_MODULES = (dense, small_rules, norms_after, gemma, moe, deepseek, glm, sigmoid, gpt_oss, qwen_next)
FAMILIES = {
    family.model_type: family for module in _MODULES for family in vars(module).values() if isinstance(family, Family)
}
