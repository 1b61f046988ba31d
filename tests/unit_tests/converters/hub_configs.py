"""config.json of published checkpoints, one per family, with the keys that their authors wrote."""

from __future__ import annotations

import json
from typing import Any

# Keys that nearly all files have, and those that all with latent attention have.
_COMMON: dict[str, Any] = json.loads("""
    {"attention_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 1, "hidden_act": "silu", "initializer_range": 0.02,
    "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.46.0", "use_cache": true}
""")
_LATENT: dict[str, Any] = json.loads("""
    {"architectures": ["DeepseekV3ForCausalLM"], "attention_bias": false, "kv_lora_rank": 512, "moe_layer_freq": 1,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
""")
_TEXTS = {
    "Qwen2.5-7B": """
    {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
    "max_position_embeddings": 131072, "max_window_layers": 28, "num_attention_heads": 28, "num_hidden_layers": 28,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 131072, "use_mrope":
    false, "use_sliding_window": false, "vocab_size": 152064}
    """,
    "Qwen3-30B-A3B": """
    {"architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false, "decoder_sparse_step": 1, "head_dim": 128,
    "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
    "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": true,
    "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "output_router_logits": false, "rms_norm_eps": 1e-06, "rope_scaling": null,
    "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": null, "use_sliding_window": false,
    "vocab_size": 151936}
    """,
    "Llama-3.1-8B": """
    {"architectures": ["LlamaForCausalLM"], "attention_bias": false, "hidden_size": 4096, "intermediate_size": 14336,
    "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling":
    {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3"}, "rope_theta": 500000.0, "vocab_size": 128256}
    """,
    "Mixtral-8x7B": """
    {"architectures": ["MixtralForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32, "num_experts_per_tok": 2,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": false,
    "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": null,
    "vocab_size": 32000}
    """,
    "OLMoE-1B-7B": """
    {"architectures": ["OlmoeForCausalLM"], "attention_bias": false, "clip_qkv": null, "hidden_size": 2048,
    "intermediate_size": 1024, "max_position_embeddings": 4096, "model_type": "olmoe", "norm_topk_prob": false,
    "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 16,
    "num_key_value_heads": 16, "output_router_logits": false, "pad_token_id": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": null, "rope_theta": 10000.0, "router_aux_loss_coef": 0.01, "vocab_size": 50304}
    """,
    "DeepSeek-V2-Lite": """
    {"auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config", "AutoModel":
    "modeling_deepseek.DeepseekV2Model", "AutoModelForCausalLM": "modeling_deepseek.DeepseekV2ForCausalLM"},
    "first_k_dense_replace": 1, "hidden_size": 2048, "intermediate_size": 10944, "max_position_embeddings": 163840,
    "model_type": "deepseek_v2", "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 64,
    "n_shared_experts": 2, "norm_topk_prob": false, "num_attention_heads": 16, "num_experts_per_tok": 6,
    "num_hidden_layers": 27, "num_key_value_heads": 16, "q_lora_rank": null, "quantization_config": null,
    "rms_norm_eps": 1e-06, "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707,
    "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096, "type": "yarn"}, "rope_theta": 10000,
    "routed_scaling_factor": 1.0, "scoring_func": "softmax", "topk_group": 1, "topk_method": "greedy", "vocab_size":
    102400, "aux_loss_alpha": 0.001, "pretraining_tp": 1, "seq_aux": true}
    """,
    "DeepSeek-V3": """
    {"auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config", "AutoModel":
    "modeling_deepseek.DeepseekV3Model", "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
    "ep_size": 1, "first_k_dense_replace": 3, "hidden_size": 7168, "intermediate_size": 18432,
    "max_position_embeddings": 163840, "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "n_group": 8,
    "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": true, "num_attention_heads": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536, "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
    "weight_block_size": [128, 128]}, "rms_norm_eps": 1e-06, "rope_scaling": {"beta_fast": 32, "beta_slow": 1,
    "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096, "type": "yarn"},
    "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_group": 4, "topk_method":
    "noaux_tc", "vocab_size": 129280}
    """,
    "Kimi-K2": """
    {"auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config", "AutoModel":
    "modeling_deepseek.DeepseekV3Model", "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
    "ep_size": 1, "first_k_dense_replace": 1, "hidden_size": 7168, "intermediate_size": 18432,
    "max_position_embeddings": 131072, "model_type": "kimi_k2", "moe_intermediate_size": 2048, "n_group": 1,
    "n_routed_experts": 384, "n_shared_experts": 1, "norm_topk_prob": true, "num_attention_heads": 64,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 64, "num_nextn_predict_layers": 0,
    "q_lora_rank": 1536, "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
    "weight_block_size": [128, 128]}, "rms_norm_eps": 1e-06, "rope_scaling": {"beta_fast": 1.0, "beta_slow": 1,
    "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096, "type": "yarn"},
    "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "topk_group": 1, "topk_method":
    "noaux_tc", "vocab_size": 163840, "aux_loss_alpha": 0.001, "pretraining_tp": 1, "seq_aux": true}
    """,
    "Moonlight-16B-A3B": """
    {"auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config", "AutoModel":
    "modeling_deepseek.DeepseekV3Model", "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
    "ep_size": 1, "first_k_dense_replace": 1, "hidden_size": 2048, "intermediate_size": 11264,
    "max_position_embeddings": 8192, "model_type": "deepseek_v3", "moe_intermediate_size": 1408, "n_group": 1,
    "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": true, "num_attention_heads": 16,
    "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16, "num_nextn_predict_layers": 0,
    "q_lora_rank": null, "rms_norm_eps": 1e-05, "rope_theta": 50000.0, "routed_scaling_factor": 2.446, "scoring_func":
    "sigmoid", "topk_group": 1, "topk_method": "noaux_tc", "vocab_size": 163840, "aux_loss_alpha": 0.001,
    "pretraining_tp": 1, "seq_aux": true}
    """,
    "GLM-4-9B-0414": """
    {"eos_token_id": [151329, 151336, 151338], "architectures": ["Glm4ForCausalLM"], "attention_bias": false,
    "head_dim": 128, "hidden_size": 4096, "intermediate_size": 13696, "max_position_embeddings": 32768, "model_type":
    "glm4", "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 2, "pad_token_id": 151329,
    "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "vocab_size": 151552}
    """,
    "GLM-4.5": """
    {"eos_token_id": [151329, 151336, 151338], "architectures": ["Glm4MoeForCausalLM"], "attention_bias": true,
    "first_k_dense_replace": 3, "head_dim": 128, "hidden_size": 5120, "intermediate_size": 12288,
    "max_position_embeddings": 131072, "model_type": "glm4_moe", "moe_intermediate_size": 1536, "n_group": 1,
    "n_routed_experts": 160, "n_shared_experts": 1, "norm_topk_prob": true, "num_attention_heads": 96,
    "num_experts_per_tok": 8, "num_hidden_layers": 92, "num_key_value_heads": 8, "num_nextn_predict_layers": 1,
    "pad_token_id": 151329, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta":
    1000000, "routed_scaling_factor": 2.5, "topk_group": 1, "use_qk_norm": true, "vocab_size": 151552}
    """,
    "gemma-3-1b": """
    {"architectures": ["Gemma3ForCausalLM"], "attention_bias": false, "attn_logit_softcapping": null,
    "cache_implementation": "hybrid", "final_logit_softcapping": null, "head_dim": 256, "hidden_activation":
    "gelu_pytorch_tanh", "hidden_size": 1152, "intermediate_size": 6912, "max_position_embeddings": 32768,
    "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
    "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000,
    "rope_scaling": null, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6, "vocab_size":
    262144}
    """,
    "gpt-oss-20b in bf16": """
    {"architectures": ["GptOssForCausalLM"], "attention_bias": true, "experts_per_token": 4, "head_dim": 64,
    "hidden_size": 2880, "initial_context_length": 4096, "intermediate_size": 2880, "layer_types":
    ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention",
    "full_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention",
    "sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention",
    "full_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention",
    "sliding_attention", "full_attention", "sliding_attention", "full_attention"], "max_position_embeddings": 131072,
    "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
    "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": false, "pad_token_id": 199999,
    "rms_norm_eps": 1e-05, "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
    "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": false}, "rope_theta": 150000,
    "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0, "vocab_size": 201088}
    """,
    "MiniMax-M2 in bf16": """
    {"architectures": ["MiniMaxM2ForCausalLM"], "attn_type_list": [1, 1, 1, 1], "auto_map": {"AutoConfig":
    "configuration_minimax_m2.MiniMaxM2Config", "AutoModelForCausalLM": "modeling_minimax_m2.MiniMaxM2ForCausalLM"},
    "head_dim": 128, "hidden_size": 3072, "intermediate_size": 1536, "max_position_embeddings": 196608, "model_type":
    "minimax_m2", "mtp_transformer_layers": 1, "num_attention_heads": 48, "num_experts_per_tok": 8,
    "num_hidden_layers": 62, "num_key_value_heads": 8, "num_local_experts": 256, "num_mtp_modules": 3,
    "partial_rotary_factor": 0.5, "qk_norm_type": "per_layer", "rms_norm_eps": 1e-06, "rope_theta": 5000000,
    "rotary_dim": 64, "scoring_func": "sigmoid", "shared_intermediate_size": 0, "use_mtp": true, "use_qk_norm": true,
    "use_routing_bias": true, "vocab_size": 200064}
    """,
    "Hy3-preview": """
    {"architectures": ["HYV3ForCausalLM"], "enable_attention_fp32_softmax": true, "enable_lm_head_fp32": true,
    "enable_moe_fp32_combine": true, "expert_hidden_dim": 1536, "first_k_dense_replace": 1, "head_dim": 128,
    "hidden_size": 4096, "intermediate_size": 13312, "max_position_embeddings": 262144, "model_type": "hy_v3",
    "moe_intermediate_size": 1536, "moe_router_enable_expert_bias": true, "moe_router_use_sigmoid": true,
    "num_attention_heads": 64, "num_experts": 192, "num_experts_per_tok": 8, "num_hidden_layers": 80,
    "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "num_shared_experts": 1, "output_router_logits": false,
    "qk_norm": true, "rms_norm_eps": 1e-05, "rope_parameters": {"rope_theta": 11158840.0, "rope_type": "default"},
    "route_norm": true, "router_scaling_factor": 2.826, "use_grouped_mm": true, "vocab_size": 120832}
    """,
}
HUB: dict[str, dict[str, Any]] = {name: _COMMON | json.loads(text) for name, text in _TEXTS.items()}
HUB |= {name: _LATENT | config for name, config in HUB.items() if "Deep" in name or "K2" in name or "Moon" in name}
for _key in ("hidden_act", "tie_word_embeddings"):
    del HUB["gemma-3-1b"][_key]
DEEPSEEK_V3 = HUB["DeepSeek-V3"]
FP8 = DEEPSEEK_V3["quantization_config"]
