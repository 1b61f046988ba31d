"""Dense decoders with grouped-query attention: Llama and its descendants."""

from __future__ import annotations

from dataclasses import replace

from mega_rl.converters.families import windows
from mega_rl.converters.families.base import NO_LINEAR_BIAS, Family
from mega_rl.converters.families.rules import col, copy, gated, in_layers, qkv, row, vocab

EMBEDDING = (vocab("embedding.word_embeddings.weight", "model.embed_tokens.weight"),)

INPUT_NORM = copy(
    "input_layernorm.weight", "input_layernorm.weight", "hidden", te="self_attention.linear_qkv.layer_norm_weight"
)
ATTENTION_OUTPUT = row("self_attention.linear_proj.weight", "self_attn.o_proj.weight", "hidden", "o")
ATTENTION_WEIGHTS = (
    qkv("self_attention.linear_qkv.weight", "self_attn.{part}_proj.weight", "hidden"),
    qkv("self_attention.linear_qkv.bias", "self_attn.{part}_proj.bias", when=["qkv_bias"]),
    copy("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", "head_dim", when=["qk_norm"]),
    copy("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", "head_dim", when=["qk_norm"]),
    ATTENTION_OUTPUT,
    copy("self_attention.linear_proj.bias", "self_attn.o_proj.bias", "hidden", when=["linear_bias"]),
)
ATTENTION = in_layers(INPUT_NORM, *ATTENTION_WEIGHTS)

# The norm before the MLP belongs to the MLP's first linear under Transformer Engine, unless experts follow it.
DENSE_NORM = copy(
    "pre_mlp_layernorm.weight",
    "post_attention_layernorm.weight",
    "hidden",
    te="mlp.linear_fc1.layer_norm_weight",
    when=["dense"],
)
MLP_WEIGHTS = (
    gated("mlp.linear_fc1.weight", "mlp.{part}_proj.weight", "ffn", "hidden", when=["dense"]),
    gated("mlp.linear_fc1.bias", "mlp.{part}_proj.bias", "ffn", when=["dense", "linear_bias"]),
    row("mlp.linear_fc2.weight", "mlp.down_proj.weight", "hidden", "ffn", when=["dense"]),
    copy("mlp.linear_fc2.bias", "mlp.down_proj.bias", "hidden", when=["dense", "linear_bias"]),
)
MLP = in_layers(DENSE_NORM, *MLP_WEIGHTS)

OUTPUT = (
    copy("decoder.final_layernorm.weight", "model.norm.weight", "hidden"),
    vocab("output_layer.weight", "lm_head.weight"),
)

DENSE = EMBEDDING + ATTENTION + MLP + OUTPUT

QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None}

LLAMA = Family(
    "llama",
    DENSE,
    title="Llama",
    differs="nothing: RMSNorm, rotary positions (linear, llama3, YaRN), grouped-query attention, gated SiLU",
    adapters_in_sglang=True,
    bias_keys=("attention_bias", "mlp_bias"),
)
QWEN2 = Family(
    "qwen2",
    DENSE,
    title="Qwen2",
    differs="biases on q, k and v; with `use_sliding_window` a window in the upper layers",
    adapters_in_sglang=True,
    defaults={"num_key_value_heads": 32, **QWEN_WINDOW},
    qkv_bias=True,
    window=windows.in_last_layers,
    in_wrappers=("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"),
)
QWEN3 = Family(
    "qwen3",
    DENSE,
    title="Qwen3",
    differs="norms of each head of q and k; with `use_sliding_window` a window in the upper layers",
    adapters_in_sglang=True,
    defaults={"num_key_value_heads": 32, "head_dim": 128, **QWEN_WINDOW},
    fixed={"attention_bias": NO_LINEAR_BIAS},
    qk_norm=True,
    window=windows.in_last_layers,
    in_wrappers=("qwen3_vl", "qwen3_vl_text"),
)
SEED_OSS = Family(
    "seed_oss",
    DENSE,
    title="Seed-OSS",
    differs="biases on q, k and v, unless `attention_bias` is false",
    absent_in_sglang=True,
    defaults={"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
    fixed={"attention_out_bias": NO_LINEAR_BIAS, "mlp_bias": NO_LINEAR_BIAS},
    qkv_bias="attention_bias",
)
ERNIE4_5 = Family(
    "ernie4_5",
    DENSE,
    title="ERNIE 4.5",
    differs="rotation of even with odd dimensions; biases on all linear layers or on none",
    defaults={"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500000.0},
    bias_keys=("use_bias",),
    tied=True,
    rope_interleaved=True,
    hub_code=("configuration_ernie4_5", "modeling_ernie4_5", "tokenization_ernie4_5"),
)
UNGATED = (
    col("mlp.linear_fc1.weight", "mlp.up_proj.weight", "ffn", "hidden"),
    col("mlp.linear_fc1.bias", "mlp.up_proj.bias", "ffn", when=["linear_bias"]),
    row("mlp.linear_fc2.weight", "mlp.down_proj.weight", "hidden", "ffn"),
    copy("mlp.linear_fc2.bias", "mlp.down_proj.bias", "hidden", when=["linear_bias"]),
)
ARCEE = Family(
    "arcee",
    EMBEDDING + ATTENTION + in_layers(replace(DENSE_NORM, when=()), *UNGATED) + OUTPUT,
    title="Arcee AFM",
    differs="a squared ReLU without a gate",
    untied_in_sglang=True,
    defaults={"rms_norm_eps": 1e-5},
    bias_keys=("attention_bias", "mlp_bias"),
    activation="relu_squared",
)


def mistral_yarn(theta: float, factor: float, length: int) -> dict[str, object]:
    """Return rope_parameters of YaRN without a factor on the rotation; queries grow with the position."""
    usual = {"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
    return usual | {"rope_theta": theta, "factor": factor, "original_max_position_embeddings": length}


MISTRAL = Family(
    "mistral",
    DENSE,
    title="Mistral",
    differs="a sliding window in every layer, unless `sliding_window` is null",
    adapters_in_sglang=True,
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    window=windows.in_all_layers,
    in_wrappers=("mistral3",),
)
