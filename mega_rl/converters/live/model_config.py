"""Keyword arguments that build a Megatron-Core model with the architecture of a Hugging Face config."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from mega_rl.converters.architecture import DeltaNet, HFConfig, Mla, Moe

# Constants of the code of GPT-OSS; its alpha of 1.702 is that of Megatron-Core's quick_gelu.
SWIGLU_LIMIT, SWIGLU_OFFSET = 7.0, 1.0


def gelu_tanh(x: Tensor) -> Tensor:
    """Return GELU in its tanh approximation."""
    return F.gelu(x, approximate="tanh")


def relu_squared(x: Tensor) -> Tensor:
    """Return the square of ReLU."""
    return F.relu(x).square()


def transformer_config_kwargs(hf: HFConfig) -> dict[str, Any]:
    """Return the arguments of `TransformerConfig`, or `MLATransformerConfig`, that the architecture determines.

    Parallel sizes, dtypes and fusions are the caller's. Dropout is off: the log-probs of a rollout must be those of the
    forward pass that trains on it, whatever the checkpoint's pre-training used.
    """
    kwargs: dict[str, Any] = {
        "num_layers": hf.num_layers,
        "hidden_size": hf.hidden_size,
        "num_attention_heads": hf.num_heads,
        "num_query_groups": hf.num_kv_heads,
        "kv_channels": hf.head_dim,
        "ffn_hidden_size": hf.ffn_hidden_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf.norm_eps,
        "layernorm_zero_centered_gamma": hf.zero_centered_norm,
        "gated_linear_unit": hf.gated,
        "add_bias_linear": hf.linear_bias,
        "add_qkv_bias": hf.qkv_bias,
        # Not for norms over all heads together: under this switch Megatron-Core sums the gradients of norms of q and k
        # over tensor parallelism, which is wrong for weights that are cut with the heads.
        "qk_layernorm": hf.qk_norm,
        "rotary_interleaved": hf.rope.interleaved,
        "softmax_scale": hf.softmax_scale,
        "softmax_type": "learnable" if hf.sinks else "vanilla",
        "mtp_num_layers": hf.mtp_layers if "mtp" in hf.switches else None,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "init_method_std": hf.initializer_range,
        "use_te_activation_func": hf.activation == "xielu",  # a module in each layer
        "activation_func": {"gelu_tanh": gelu_tanh, "relu_squared": relu_squared}.get(hf.activation, F.silu),
    }
    if hf.activation == "swiglu_clamped":
        # Not above: this module may be imported before the accelerator is prepared, Megatron-Core may not.
        from megatron.core.fusions.fused_bias_geglu import quick_gelu  # Megatron-Core knows it by identity

        clamped = {"activation_func_clamp_value": SWIGLU_LIMIT, "glu_linear_offset": SWIGLU_OFFSET}
        kwargs |= {"activation_func": quick_gelu, **clamped}
    if any(hf.unrotated):
        kwargs["no_rope_freq"] = [int(unrotated) for unrotated in hf.unrotated]
    if hf.window is not None:
        # Megatron-Core counts the tokens before the present one, and marks layers with a window by 1.
        layers = None if all(hf.window.layers) else [int(windowed) for windowed in hf.window.layers]
        kwargs |= {"window_size": (hf.window.size - 1, 0), "window_attn_skip_freq": layers}
    if hf.moe is not None:
        kwargs |= _moe_kwargs(hf.moe)
    if hf.mla is not None:
        kwargs |= _mla_kwargs(hf, hf.mla)
    if hf.delta is not None:
        kwargs |= _delta_kwargs(hf.delta)
    if hf.attention_gate:
        kwargs["attention_output_gate"] = True
    return kwargs


def _delta_kwargs(delta: DeltaNet) -> dict[str, Any]:
    """Return the sizes of gated delta nets, which Megatron-Core 0.16 does not know."""
    return {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [int(linear) for linear in delta.layers],
        "linear_num_key_heads": delta.num_key_heads,
        "linear_num_value_heads": delta.num_value_heads,
        "linear_key_head_dim": delta.key_head_dim,
        "linear_value_head_dim": delta.value_head_dim,
        "linear_conv_kernel_dim": delta.conv_kernel,
    }


def _moe_kwargs(moe: Moe) -> dict[str, Any]:
    """Return the mixture's sizes and routing without balancing, which would be a second objective.

    The router runs in float32, so that training and rollout choose the same experts.
    """
    return {
        "num_moe_experts": moe.num_experts,
        "moe_layer_freq": [int(mixed) for mixed in moe.layers],
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        "moe_shared_expert_intermediate_size": moe.shared_ffn_hidden_size or None,
        "moe_shared_expert_gate": moe.shared_gate,
        "moe_router_topk": moe.top_k,
        "moe_router_score_function": moe.score,
        "moe_router_pre_softmax": moe.score_before_topk,
        "moe_router_topk_scaling_factor": None if moe.scaling == 1.0 else moe.scaling,
        "moe_router_num_groups": moe.num_groups,
        "moe_router_group_topk": moe.topk_groups,
        # Of a softmax the corrections are our router's: Megatron-Core has them only for a sigmoid.
        "moe_router_enable_expert_bias": moe.expert_bias and moe.score == "sigmoid",
        "moe_router_bias_update_rate": 0.0,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }


def _mla_kwargs(hf: HFConfig, mla: Mla) -> dict[str, Any]:
    """Return latent attention with its rotary settings; Megatron-Core's defaults are those of one model."""
    yarn = hf.rope.yarn
    kwargs: dict[str, Any] = {
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_head_dim": mla.qk_nope_head_dim,
        "qk_pos_emb_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "rope_type": "rope" if yarn is None else "yarn",
        "rotary_base": hf.rope.theta,
        "rotary_percent": 1.0,
        "rotary_scaling_factor": hf.rope.factor,
        "mscale": 1.0,
        "mscale_all_dim": 0.0,
    }
    if (indexer := mla.indexer) is not None:
        kwargs |= {
            "experimental_attention_variant": "dsa",
            "dsa_indexer_n_heads": indexer.num_heads,
            "dsa_indexer_head_dim": indexer.head_dim,
            "dsa_indexer_topk": indexer.top_k,
            "dsa_indexer_rope_interleaved": indexer.interleaved,
            # A rotation of queries and keys alike, which products of both do not see.
            "dsa_indexer_rotate_activation": False,
        }
    if yarn is not None:
        kwargs |= {
            "original_max_position_embeddings": yarn.original_max_position_embeddings,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
        }
        if hf.softmax_scale is not None:
            kwargs |= {"mscale": 0.0}  # no factor, neither on logits nor on the rotation
        elif yarn.mscale and yarn.mscale_all_dim:
            kwargs |= {"mscale": yarn.mscale, "mscale_all_dim": yarn.mscale_all_dim}
    return kwargs


def extra_config_attributes(hf: HFConfig) -> dict[str, Any]:
    """Return attributes to set on the config that is made; `TransformerConfig` lacks them.

    `GPTModel` reads yarn's. Without both mscales it takes 0.1 ln(factor) + 1, as transformers does. Our attention reads
    `query_growth`, (factor, length) of `Yarn`, and our router the floor.
    """
    yarn, extra = hf.rope.yarn, dict[str, Any]()
    if hf.moe is not None and hf.moe.weight_floor is not None:
        extra["moe_router_weight_floor"] = hf.moe.weight_floor
    if yarn is not None and yarn.query_growth:
        extra["query_growth"] = (yarn.query_growth, yarn.original_max_position_embeddings)
    if yarn is None or hf.mla is not None:
        return extra
    both = bool(yarn.mscale and yarn.mscale_all_dim)
    return extra | {
        "yarn_rotary_scaling_factor": hf.rope.factor,
        "yarn_original_max_position_embeddings": yarn.original_max_position_embeddings,
        "yarn_beta_fast": yarn.beta_fast,
        "yarn_beta_slow": yarn.beta_slow,
        "yarn_mscale": yarn.mscale if both else None,
        "yarn_mscale_all_dim": yarn.mscale_all_dim if both else None,
        "yarn_correction_range_round_to_int": yarn.truncate,
    }


def unfused(hf: HFConfig) -> dict[str, Any]:
    """Return arguments of `TransformerConfig` that turn off fusions which are wrong or missing for this architecture.

    Megatron-Core's fused rotation of packed sequences silently leaves out yarn's scale and always rotates halves
    against each other; under latent attention it exists only for yarn and is experimental. Its fused activations are
    silu, GELU and quick GELU.
    """
    off: dict[str, Any] = {}
    if hf.mla is not None or hf.rope.kind == "yarn" or hf.rope.interleaved:
        off["apply_rope_fusion"] = False
    if hf.activation in ("gelu_tanh", "relu_squared", "xielu"):
        off["bias_activation_fusion"] = False
    return off


def gpt_model_kwargs(hf: HFConfig, padded_vocab: int) -> dict[str, Any]:
    """Return the arguments of `megatron.core.models.gpt.GPTModel` that the architecture determines.

    A linear RoPE factor divides the positions, exactly as Megatron-Core's sequence interpolation does; yarn is a kind
    of position embedding, except under latent attention, which has its own. The frequencies of llama3 scaling are set
    on the built model (`mega_rl.engines.models.rope`), since Megatron-Core takes only one of its four settings.
    """
    rope = hf.rope
    return {
        "vocab_size": padded_vocab,
        "max_sequence_length": hf.max_position_embeddings,
        "share_embeddings_and_output_weights": hf.tied,
        "position_embedding_type": "yarn" if rope.kind == "yarn" and hf.mla is None else "rope",
        "rotary_percent": rope.percent,
        "rotary_base": int(rope.theta) if rope.theta == int(rope.theta) else rope.theta,
        "seq_len_interpolation_factor": rope.factor if rope.kind == "linear" and rope.factor != 1.0 else None,
    }
