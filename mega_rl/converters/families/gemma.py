"""Gemma 3, text only: norms on both sides, two rotary bases, windows in most layers."""

from __future__ import annotations

from mega_rl.converters.families import windows
from mega_rl.converters.families.base import NO_LINEAR_BIAS, Family
from mega_rl.converters.families.dense import ATTENTION, EMBEDDING, OUTPUT
from mega_rl.converters.families.fields import Fields
from mega_rl.converters.families.rules import copy, gated, in_layers, row

GEMMA3_LAYERS = ATTENTION + in_layers(
    copy("post_self_attn_layernorm.weight", "post_attention_layernorm.weight", "hidden"),
    copy(
        "pre_mlp_layernorm.weight",
        "pre_feedforward_layernorm.weight",
        "hidden",
        te="mlp.linear_fc1.layer_norm_weight",
    ),
    gated("mlp.linear_fc1.weight", "mlp.{part}_proj.weight", "ffn", "hidden"),
    row("mlp.linear_fc2.weight", "mlp.down_proj.weight", "hidden", "ffn"),
    copy("post_mlp_layernorm.weight", "post_feedforward_layernorm.weight", "hidden"),
)


def scales(fields: Fields) -> dict[str, float]:
    """Return sqrt(hidden size) for embeddings and 1 / sqrt(query_pre_attn_scalar) for attention logits."""
    scalar = fields.number("query_pre_attn_scalar", default=256.0)
    embedding = {"embedding_scale": float(fields.size("hidden_size")) ** 0.5}
    return embedding if scalar == fields.size("head_dim") else embedding | {"softmax_scale": scalar**-0.5}


GEMMA3_TEXT = Family(
    "gemma3_text",
    EMBEDDING + GEMMA3_LAYERS + OUTPUT,
    title="Gemma 3",
    differs=(
        "norms that multiply by 1 + weight, on outputs and on q and k too; GELU; windows in five of six layers, with a "
        "RoPE base of their own; a scaled embedding"
    ),
    defaults={
        # The files of this family leave out what equals the default of its class, sizes too.
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "layer_types": None,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
    fixed={
        "attention_bias": NO_LINEAR_BIAS,
        **dict.fromkeys(
            ("final_logit_softcapping", "attn_logit_softcapping"), ((), "Megatron-Core does not cap logits")
        ),
        "use_bidirectional_attention": ((False,), "a policy attends to the past only"),
    },
    qk_norm=True,
    tied=True,
    rope_per_layer_type=True,
    window=windows.but_every_nth,
    activation="gelu_tanh",
    zero_centered_norm=True,
    post_norms=True,
    scales=scales,
    in_wrappers=("gemma3",),
)
