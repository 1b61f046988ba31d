"""GLM-4: dense with norms behind attention and MLP, and the mixtures of 4.5 to 4.7."""

from __future__ import annotations

from dataclasses import replace

from mega_rl.converters.architecture import Moe
from mega_rl.converters.families.base import Family, KnownBug
from mega_rl.converters.families.deepseek import (
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    INTERLEAVED,
    MTP,
    MTP_REPEATED,
    SHARED_CHOICE,
    SHARED_MOE,
    SIGMOID_ROUTER,
    by_mlp_types,
    deepseek_v3_moe,
    latent_sizes,
    routed,
    shared_width,
    sigmoid_moe,
)
from mega_rl.converters.families.dense import ATTENTION, DENSE_NORM, EMBEDDING, MLP, OUTPUT
from mega_rl.converters.families.fields import Fields
from mega_rl.converters.families.rules import copy, fused_gated, in_layers, in_mtp_layers, row

GLM4_LAYERS = ATTENTION + in_layers(
    copy("post_self_attn_layernorm.weight", "post_self_attn_layernorm.weight", "hidden"),
    DENSE_NORM,
    fused_gated("mlp.linear_fc1.weight", "mlp.gate_up_proj.weight", "two_ffn", "hidden", when=["dense"]),
    row("mlp.linear_fc2.weight", "mlp.down_proj.weight", "hidden", "ffn", when=["dense"]),
    copy("post_mlp_layernorm.weight", "post_mlp_layernorm.weight", "hidden"),
)
GLM4_MOE_LAYERS = ATTENTION + MLP + SHARED_MOE

GLM4 = Family(
    "glm4",
    EMBEDDING + GLM4_LAYERS + OUTPUT,
    title="GLM-4",
    differs=(
        "biases on q, k and v; rotation of even with odd dimensions of half a head; norms on outputs too; gate and up "
        "in one tensor"
    ),
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-07,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
    },
    qkv_bias="attention_bias",
    rope_interleaved=True,
    partial_rotary=True,
    post_norms=True,
)
GLM4_MOE = Family(
    "glm4_moe",
    EMBEDDING + GLM4_MOE_LAYERS + OUTPUT + in_mtp_layers(GLM4_MOE_LAYERS) + MTP,
    title="GLM-4-MoE",
    differs=(
        "biases on q, k and v and norms of q and k where the config says so; rotation of half a head; mixtures with "
        "sigmoid routing and shared experts behind the first layers; MTP"
    ),
    untied_in_sglang=True,
    defaults={
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "partial_rotary_factor": 0.5,
        "use_qk_norm": False,
        "first_k_dense_replace": 1,
        **routed(128, 8, 1408, 1.0),
    },
    fixed=SIGMOID_ROUTER,
    qkv_bias="attention_bias",
    qk_norm="use_qk_norm",
    partial_rotary=True,
    moe=deepseek_v3_moe,
    mtp_ignored=MTP_REPEATED,
)


def lite_moe(fields: Fields, num_layers: int) -> Moe | None:
    """Return the mixture of GLM-4.7-Flash: that of DeepSeek-V3 in the layers that `mlp_layer_types` names."""
    return sigmoid_moe(fields, by_mlp_types(fields, num_layers), shared=shared_width(fields))


GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    model_type="glm4_moe_lite",
    title="GLM-4.7-Flash",
    differs="what DeepSeek-V3 does; `mlp_layer_types` says which layers are mixtures",
    untied_in_sglang=True,
    needed_by_sglang=("first_k_dense_replace",),
    defaults={
        "num_key_value_heads": 20,
        "rms_norm_eps": 1e-5,
        "mlp_layer_types": None,
        "first_k_dense_replace": None,
        **latent_sizes(768, 512, 192, 64, 256),
        **routed(64, 4, 1536, 1.8),
    },
    moe=lite_moe,
    hub_code=(),
)
GLM_MOE_DSA = replace(
    DEEPSEEK_V32,
    model_type="glm_moe_dsa",
    title="GLM-5",
    defaults={
        **{key: value for key, value in DEEPSEEK_V32.defaults.items() if key != "num_experts"},
        "num_key_value_heads": 64,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_group": 1,
        "topk_group": 1,
        "index_n_heads": 32,
        INTERLEAVED: True,
    },
    fixed={
        **DEEPSEEK_V3.fixed,
        "index_topk_freq": ((1,), SHARED_CHOICE),
        "index_topk_pattern": ((), SHARED_CHOICE),
        INTERLEAVED: ((True,), "transformers rotates even with odd dimensions of the indexer"),
    },
    keys=(*DEEPSEEK_V32.keys, "indexer_types", "index_skip_topk_offset", "index_share_for_mtp_iteration"),
    needed_by_sglang=(INTERLEAVED,),
    known_bugs=(
        KnownBug(
            "5.13.0",
            lambda hf: True,
            "transformers before 5.13 rotates the dimensions of glm_moe_dsa's indexer in halves (fixed by "
            "huggingface/transformers#46842)",
        ),
    ),
)
