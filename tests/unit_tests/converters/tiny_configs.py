"""A tiny config.json of every family as transformers 4 wrote them, sizes as unequal as they can be.

A family that is not here has the settings of its tiny checkpoint (`tests.helpers.models.TINY`) beside `BASE`.
"""

from __future__ import annotations

from typing import Any

from mega_rl.converters.families import FAMILIES
from tests.helpers import models

BASE: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 56,
    "vocab_size": 99,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {
    **BASE,
    "num_key_value_heads": 4,
    "q_lora_rank": 28,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1}
ROUTED = {"n_shared_experts": 2, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}

TINY: dict[str, dict[str, Any]] = {
    "qwen2": BASE,
    "qwen3": {**BASE, "head_dim": 12},
    "llama": BASE,
    "mistral": {**BASE, "head_dim": 12, "sliding_window": 6},
    "mixtral": {**BASE, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen2_moe": {
        **BASE,
        **EXPERTS,
        "shared_expert_intermediate_size": 32,
        "decoder_sparse_step": 2,
        "norm_topk_prob": False,
        "use_sliding_window": False,
    },
    "qwen3_moe": {**BASE, **EXPERTS, "head_dim": 12, "mlp_only_layers": [1], "norm_topk_prob": True},
    "olmoe": {**BASE, "num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24, "clip_qkv": None},
    "deepseek_v2": {**LATENT, "n_shared_experts": 2, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
    "deepseek_v3": {
        **LATENT,
        **ROUTED,
        "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        "num_nextn_predict_layers": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
    "kimi_k2": {
        **LATENT,
        **ROUTED,
        "n_group": 1,
        "topk_group": 1,
        "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
        "num_nextn_predict_layers": 0,
    },
    "glm4": {**BASE, "head_dim": 12, "partial_rotary_factor": 0.5, "attention_bias": True},
    "glm4_moe": {
        **BASE,
        **ROUTED,
        "head_dim": 12,
        "n_group": 1,
        "topk_group": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "use_qk_norm": True,
        "num_nextn_predict_layers": 1,
    },
    "gemma3_text": {
        **{key: value for key, value in BASE.items() if key != "tie_word_embeddings"},
        "head_dim": 12,
        "query_pre_attn_scalar": 16,
        "sliding_window": 6,
        "sliding_window_pattern": 3,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "gpt_oss": {
        **BASE,
        "head_dim": 12,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 24,
        "sliding_window": 6,
        "rope_theta": 150000.0,
        "rope_scaling": {**YARN, "truncate": False},
    },
    # A second member of a family, where configs of one type differ much.
    "moonlight": {**LATENT, **ROUTED, "q_lora_rank": None, "n_group": 1, "topk_group": 1},
}
TINY |= {family: {**BASE, **models.TINY[family]} for family in FAMILIES if family not in TINY}
TINY = {name: {"model_type": "deepseek_v3" if name == "moonlight" else name, **TINY[name]} for name in TINY}
