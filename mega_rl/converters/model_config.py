"""Keyword arguments that build a Megatron-Core model with the architecture of a Hugging Face config."""

from __future__ import annotations

from typing import Any

from torch.nn import functional as F

from mega_rl.converters.architecture import HFConfig


def transformer_config_kwargs(hf: HFConfig) -> dict[str, Any]:
    """Arguments of `megatron.core.transformer.TransformerConfig` that the architecture determines.

    Parallel sizes, dtypes and fusions are the caller's. Dropout is off: the log-probs of a rollout must be those of the
    forward pass that trains on it, whatever the checkpoint's pre-training used.
    """
    return {
        "num_layers": hf.num_layers,
        "hidden_size": hf.hidden_size,
        "num_attention_heads": hf.num_heads,
        "num_query_groups": hf.num_kv_heads,
        "kv_channels": hf.head_dim,
        "ffn_hidden_size": hf.ffn_hidden_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf.norm_eps,
        "activation_func": F.silu,
        "gated_linear_unit": True,
        "add_bias_linear": hf.linear_bias,
        "add_qkv_bias": hf.qkv_bias,
        "qk_layernorm": hf.qk_norm,
        "rotary_interleaved": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "init_method_std": hf.initializer_range,
    }


def gpt_model_kwargs(hf: HFConfig, padded_vocab: int) -> dict[str, Any]:
    """Arguments of `megatron.core.models.gpt.GPTModel` that the architecture determines.

    A linear RoPE factor divides the positions, exactly as Megatron-Core's sequence interpolation does; llama3 has its
    own switch.
    """
    rope = hf.rope
    return {
        "vocab_size": padded_vocab,
        "max_sequence_length": hf.max_position_embeddings,
        "share_embeddings_and_output_weights": hf.tied,
        "position_embedding_type": "rope",
        "rotary_percent": 1.0,
        "rotary_base": int(rope.theta) if rope.theta == int(rope.theta) else rope.theta,
        "rope_scaling": rope.kind == "llama3",
        "rope_scaling_factor": rope.factor if rope.kind == "llama3" else 8.0,
        "seq_len_interpolation_factor": rope.factor if rope.kind == "linear" and rope.factor != 1.0 else None,
    }
