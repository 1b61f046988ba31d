"""GPT-OSS: biases everywhere, attention sinks, every second layer with a window, all experts in one tensor."""

from __future__ import annotations

from mega_rl.converters.families import windows
from mega_rl.converters.families.base import Family
from mega_rl.converters.families.dense import ATTENTION, EMBEDDING, OUTPUT
from mega_rl.converters.families.moe import EXPERT, MOE_NORM, mixtral_moe
from mega_rl.converters.families.rules import col, copy, fused_gated, in_layers, row

# On disk an expert's weights are (input, output), gate and up taking turns along the output.
GPT_OSS_MOE = in_layers(
    MOE_NORM,
    copy("mlp.router.weight", "mlp.router.weight", "experts", "hidden"),
    copy("mlp.router.bias", "mlp.router.bias", "experts"),
    fused_gated(
        EXPERT + "fc1.weight",
        "mlp.experts.gate_up_proj",
        "experts",
        "hidden",
        "two_expert_ffn",
        stacked=True,
        transposed=True,
        interleaved=True,
    ),
    fused_gated(
        EXPERT + "fc1.bias",
        "mlp.experts.gate_up_proj_bias",
        "experts",
        "two_expert_ffn",
        stacked=True,
        interleaved=True,
    ),
    row(
        EXPERT + "fc2.weight", "mlp.experts.down_proj", "experts", "expert_ffn", "hidden", stacked=True, transposed=True
    ),
    copy(EXPERT + "fc2.bias", "mlp.experts.down_proj_bias", "experts", "hidden", stacked=True),
)
SINKS = in_layers(col("self_attention.core_attention.softmax_offset", "self_attn.sinks", "heads"))


GPT_OSS = Family(
    "gpt_oss",
    EMBEDDING + ATTENTION + SINKS + GPT_OSS_MOE + OUTPUT,
    title="GPT-OSS",
    differs=(
        "biases everywhere; attention sinks; windows in every other layer; a clamped activation; mixtures in every "
        "layer, their experts stacked, transposed and interleaved"
    ),
    untied_in_sglang=True,
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "sliding_window": 128,
        "layer_types": None,
        "rope_theta": 150000.0,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    fixed={
        "attention_bias": ((True,), "the experts have biases, and Megatron-Core has all or none"),
        "swiglu_alpha": ((1.702,), "the code has the slope 1.702 built in"),
        "swiglu_limit": ((7.0, 7), "the code has the limit 7 built in"),
    },
    keys=("experts_per_token", "initial_context_length"),
    qkv_bias=True,
    window=lambda fields, num_layers: windows.by_layer_types(fields, [i % 2 == 0 for i in range(num_layers)]),
    moe=mixtral_moe,
    linear_bias=True,
    sinks=True,
    activation="swiglu_clamped",
    fused_experts=True,
)
