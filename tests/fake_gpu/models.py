"""Models on the fake device, by what their config.json would have."""

from __future__ import annotations

from typing import Any

DENSE = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
}
SMALL = {**DENSE, "vocab_size": 2048, "hidden_size": 256, "head_dim": 64, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "intermediate_size": 512}
LARGE = {**DENSE, "hidden_size": 4096, "num_attention_heads": 32, "intermediate_size": 12288}
LARGE |= {"tie_word_embeddings": False}
LATENT = {
    "model_type": "deepseek_v3",
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 2.5,
    "rope_interleave": True,
    "attention_bias": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "0.6b": DENSE,
    "8b": LARGE,
    "0.6b, 2 layers": {**DENSE, "vocab_size": 2048},
    "0.6b, 4 layers": {**DENSE, "vocab_size": 2048, "num_hidden_layers": 4},
    "8b, 4 layers": {**LARGE, "num_hidden_layers": 4},
    "30b-a3b": {
        **DENSE,
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "tie_word_embeddings": False,
    },
    "v3": {
        **DENSE,
        **LATENT,
        "vocab_size": 129280,
        "hidden_size": 4096,
        "intermediate_size": 9216,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 32,
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1024,
        "tie_word_embeddings": False,
    },
    "dense": SMALL,
    "moe": {
        **SMALL,
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "mla": {
        **SMALL,
        **LATENT,
        "num_key_value_heads": 4,
        "q_lora_rank": 64,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
    },
}
