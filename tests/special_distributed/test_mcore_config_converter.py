"""config.json to Megatron-Core's config at TP2 PP2 CP2, every field against values written out by hand.

A field that is not named here must have the default of its class: nothing is set that nobody meant.
"""

from __future__ import annotations

import os
from dataclasses import MISSING, fields
from functools import partial
from importlib.metadata import version
from typing import Any

import pytest

from mega_rl.config.schema import MegatronConfig, ModelConfig
from mega_rl.converters.hf.config import parse_hf_config, release_problems
from mega_rl.parallel.layout import ParallelLayout
from tests.special_distributed.program import finish, pass_on_four_ranks, world
from tests.unit_tests.converters.tiny_configs import TINY

DEFAULT = "as by default"
LAYOUT = ParallelLayout(world_size=8, tp=2, pp=2, cp=2, sequence_parallel=True)

# What layout, dtype and the trainer's conventions set, the same for every model.
OF_THE_LAYOUT = {
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "context_parallel_size": 2,
    "expert_tensor_parallel_size": 1,
    "sequence_parallel": True,
    "microbatch_group_size_per_vp_stage": 2,
    "variable_seq_lengths": True,
    "batch_p2p_sync": False,
    "bf16": True,
    "params_dtype": "torch.bfloat16",
    "autocast_dtype": "torch.bfloat16",
    "pipeline_dtype": "torch.bfloat16",
    "calculate_per_token_loss": True,
    "perform_initialization": False,
    "moe_token_dispatcher_type": "alltoall",
    "recompute_modules": ["core_attn"],
    "cuda_graph_scope": [],
}
# What all families have in common, in the tiny sizes.
COMMON = {
    **OF_THE_LAYOUT,
    "num_layers": 4,
    "hidden_size": 40,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 56,
    "layernorm_epsilon": 1e-6,
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": "silu",
    "add_bias_linear": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "init_method": ("normal_", 0.02),
    "embedding_init_method": ("normal_", 0.02),
    "embedding_init_method_std": 0.02,
    "output_layer_init_method": ("normal_", 0.02 / 8**0.5),
}
ROUTER = {
    "moe_router_load_balancing_type": "none",
    "moe_router_dtype": "fp32",
    "moe_grouped_gemm": True,
    "moe_router_bias_update_rate": 0.0,
}
PRE_SOFTMAX = {"moe_router_pre_softmax": True}
MIXTURE = {**ROUTER, "num_moe_experts": 4, "moe_ffn_hidden_size": 24}
SIGMOID = {
    **ROUTER,
    "num_moe_experts": 8,
    "moe_layer_freq": [0, 1, 1, 1],
    "moe_ffn_hidden_size": 24,
    "moe_shared_expert_intermediate_size": 48,
    "moe_router_score_function": "sigmoid",
    "moe_router_pre_softmax": True,
    "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 2.5,
}


def without(values: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != name}


LATENT = {
    # The class of latent attention has RMSNorm by default.
    **without(COMMON, "normalization"),
    "num_query_groups": 4,
    "kv_channels": 10,
    "qk_layernorm": True,
    "q_lora_rank": 28,
    "kv_lora_rank": 20,
    "qk_head_dim": 12,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 10,
}

KIMI = {**LATENT, **SIGMOID, "moe_router_topk": 4, "rope_type": "rope", "rotary_scaling_factor": 1.0}
EXPECTED: dict[str, dict[str, Any]] = {
    "qwen2": {**COMMON, "kv_channels": 10, "add_qkv_bias": True},
    "qwen3": {**COMMON, "kv_channels": 12, "qk_layernorm": True},
    "llama": {**COMMON, "kv_channels": 10},
    "mistral": {**COMMON, "kv_channels": 12, "window_size": (5, 0)},
    "mixtral": {**COMMON, **MIXTURE, "kv_channels": 10, "moe_layer_freq": [1] * 4, "moe_ffn_hidden_size": 56},
    "qwen2_moe": {
        **COMMON,
        **MIXTURE,
        "kv_channels": 10,
        "add_qkv_bias": True,
        "moe_layer_freq": [0, 1, 0, 1],
        "moe_shared_expert_intermediate_size": 32,
        "moe_shared_expert_gate": True,
        **PRE_SOFTMAX,
    },
    "qwen3_moe": {**COMMON, **MIXTURE, "kv_channels": 12, "qk_layernorm": True, "moe_layer_freq": [1, 0, 1, 1]},
    "olmoe": {**COMMON, **MIXTURE, **PRE_SOFTMAX, "kv_channels": 10, "ffn_hidden_size": 24, "moe_layer_freq": [1] * 4},
    "deepseek_v2": {
        **LATENT,
        **ROUTER,
        "num_moe_experts": 8,
        "moe_layer_freq": [0, 1, 1, 1],
        "moe_ffn_hidden_size": 24,
        "moe_shared_expert_intermediate_size": 48,
        "moe_router_topk": 4,
        "moe_router_pre_softmax": True,
        "rope_type": "rope",
        "rotary_scaling_factor": 1.0,
    },
    "deepseek_v3": {
        **LATENT,
        **SIGMOID,
        "moe_router_topk": 4,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "rotary_scaling_factor": 4.0,
        "original_max_position_embeddings": 32,
        "mscale_all_dim": 1.0,
    },
    "kimi_k2": KIMI,
    "moonlight": {**KIMI, "q_lora_rank": None},
    "glm4": {**COMMON, "kv_channels": 12, "add_qkv_bias": True, "rotary_interleaved": True},
    "glm4_moe": {**COMMON, **SIGMOID, "kv_channels": 12, "add_qkv_bias": True, "qk_layernorm": True},
    "gemma3_text": {
        **COMMON,
        "kv_channels": 12,
        "qk_layernorm": True,
        "layernorm_zero_centered_gamma": True,
        "activation_func": "gelu_tanh",
        "softmax_scale": 0.25,
        "window_size": (5, 0),
        "window_attn_skip_freq": [1, 1, 0, 1],
    },
    "gpt_oss": {
        **without(COMMON, "add_bias_linear"),  # true, as by default
        **MIXTURE,
        "kv_channels": 12,
        "ffn_hidden_size": 24,
        "add_qkv_bias": True,
        "moe_layer_freq": [1] * 4,
        "softmax_type": "learnable",
        "window_size": (5, 0),
        "window_attn_skip_freq": [1, 0, 1, 0],
        "activation_func": "quick_gelu",
        "activation_func_clamp_value": 7.0,
        "glu_linear_offset": 1.0,
        # Not fields of the class.
        "yarn_rotary_scaling_factor": 4.0,
        "yarn_original_max_position_embeddings": 32,
        "yarn_beta_fast": 32.0,
        "yarn_beta_slow": 1.0,
        "yarn_mscale": None,
        "yarn_mscale_all_dim": None,
        "yarn_correction_range_round_to_int": False,
    },
}


def differing_fields() -> dict[str, dict[str, Any]]:
    """Of every family the class of its config, every field that has not its default, and what is set beside the fields.

    Functions come as their names, initialisers with their standard deviations, types of tensors as text.
    """
    from mega_rl.parallel.accelerator import prepare

    prepare("cpu")
    from mega_rl.engines.models.build import transformer_config

    actual = {}
    for name, raw in TINY.items():
        if list(release_problems(raw["model_type"])):
            continue
        config = transformer_config(
            parse_hf_config(raw),
            layout=LAYOUT,
            model=ModelConfig(),
            megatron=MegatronConfig(),
            deterministic=False,
            attention="sdpa",
            device_overrides={},
        )
        actual[name] = {"class": type(config).__name__}
        for field in fields(config):
            made = field.default_factory() if field.default_factory is not MISSING else None
            default = made if field.default is MISSING else field.default
            if getattr(config, field.name) != default:
                actual[name][field.name] = plain(getattr(config, field.name))
        beside = vars(config).keys() - {field.name for field in fields(config)}
        actual[name] |= {key: getattr(config, key) for key in beside if key.startswith("yarn_")}
    return actual


def plain(value: Any) -> Any:
    """A value that reads the same wherever it was made."""
    if isinstance(value, partial):
        assert value.keywords["mean"] == 0.0
        return (value.func.__name__, value.keywords["std"])
    if isinstance(value, (bool, int, float, str, list, tuple, type(None))):
        return value
    return value.__name__ if callable(value) else str(value)


def every_field_is_as_expected() -> None:
    assert EXPECTED.keys() <= TINY.keys()
    actual = differing_fields()
    for name, expected in EXPECTED.items():
        latent = name in ("deepseek_v2", "deepseek_v3", "kimi_k2", "moonlight")
        whole = expected | {"class": "MLATransformerConfig" if latent else "TransformerConfig"}
        wrong = [
            f"{name}.{field} is {actual[name].get(field, DEFAULT)}, expected {whole.get(field, DEFAULT)}"
            for field in sorted(whole.keys() | actual[name].keys())
            if field not in actual[name] or field not in whole or actual[name][field] != whole[field]
        ]
        assert not wrong, "\n".join(wrong)


def main() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a config is made without a device
    every_field_is_as_expected()
    with world() as ranks:
        finish(ranks)


@pytest.mark.skipif(not version("megatron-core").startswith("0.16."), reason="fields are those of Megatron-Core 0.16")
def test_on_four_ranks() -> None:
    pass_on_four_ranks(main)


if __name__ == "__main__":
    main()
