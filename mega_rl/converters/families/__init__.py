"""The registry of model families by `model_type` of config.json."""

from __future__ import annotations

from mega_rl.converters.families.base import Family
from mega_rl.converters.families.dense import LLAMA, QWEN2, QWEN3

__all__ = ["FAMILIES", "Family"]

FAMILIES = {family.model_type: family for family in (QWEN2, QWEN3, LLAMA)}
