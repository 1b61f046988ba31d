"""The registry of model families by `model_type` of config.json.

Adding one takes its entry in a module of this folder, a line here, and its line of test data: docs/converters.md.
"""

from __future__ import annotations

from mega_rl.converters.families.base import Family, KnownBug
from mega_rl.converters.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, DEEPSEEK_V32, KIMI_K2, MISTRAL4
from mega_rl.converters.families.dense import ARCEE, ERNIE4_5, LLAMA, MISTRAL, QWEN2, QWEN3, SEED_OSS
from mega_rl.converters.families.gemma import GEMMA3_TEXT
from mega_rl.converters.families.glm import GLM4, GLM4_MOE, GLM4_MOE_LITE, GLM_MOE_DSA
from mega_rl.converters.families.gpt_oss import GPT_OSS
from mega_rl.converters.families.moe import ERNIE4_5_MOE, MIXTRAL, OLMOE, QWEN2_MOE, QWEN3_MOE
from mega_rl.converters.families.norms_after import EXAONE4, OLMO2, OLMO3
from mega_rl.converters.families.qwen_next import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from mega_rl.converters.families.sigmoid import DOTS1, HY_V3, MINIMAX_M2
from mega_rl.converters.families.small_rules import APERTUS, GRANITE, MINISTRAL3, PHI3, SMOLLM3

__all__ = ["FAMILIES", "Family", "KnownBug"]

FAMILIES = {
    family.model_type: family
    for family in (
        LLAMA,
        MISTRAL,
        QWEN2,
        QWEN3,
        SEED_OSS,
        ERNIE4_5,
        ARCEE,
        APERTUS,
        GEMMA3_TEXT,
        GLM4,
        MIXTRAL,
        QWEN2_MOE,
        QWEN3_MOE,
        OLMOE,
        ERNIE4_5_MOE,
        DEEPSEEK_V2,
        DEEPSEEK_V3,
        KIMI_K2,
        MISTRAL4,
        DEEPSEEK_V32,
        GLM4_MOE,
        GLM4_MOE_LITE,
        GLM_MOE_DSA,
        DOTS1,
        MINIMAX_M2,
        HY_V3,
        GPT_OSS,
        QWEN3_NEXT,
        QWEN3_5,
        QWEN3_5_MOE,
        OLMO2,
        OLMO3,
        EXAONE4,
        SMOLLM3,
        PHI3,
        GRANITE,
        MINISTRAL3,
    )
}
