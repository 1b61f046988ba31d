"""Dense decoders that differ from Llama by a small rule: Apertus, SmolLM3, Phi-3, Granite, Ministral 3."""

from __future__ import annotations

from mega_rl.converters.architecture import Window
from mega_rl.converters.families import windows
from mega_rl.converters.families.base import NO_LINEAR_BIAS, Family
from mega_rl.converters.families.dense import (
    ATTENTION_OUTPUT,
    ATTENTION_WEIGHTS,
    DENSE,
    DENSE_NORM,
    EMBEDDING,
    INPUT_NORM,
    OUTPUT,
    UNGATED,
    mistral_yarn,
)
from mega_rl.converters.families.fields import Fields
from mega_rl.converters.families.rules import copy, fused_gated, in_layers, joined_qkv, row


def unrotated(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Return the layers of SmolLM3 without rotation: 0 in `no_rope_layers`, else every fourth."""
    given = fields.get("no_rope_layers")
    if given is None:
        every = fields.size("no_rope_layer_interval")
        return tuple((i + 1) % every == 0 for i in range(num_layers))
    if isinstance(given, list) and len(given) == num_layers and all(one in (0, 1) for one in given):
        return tuple(not one for one in given)
    fields.refuse("no_rope_layers", f"must be a list of {num_layers}, one per layer, of 1 (rotates) or 0")
    return ()


def where_unrotated(fields: Fields, num_layers: int) -> Window | None:
    """Return the window of SmolLM3: layers that do not rotate if `use_sliding_window`, or as `layer_types` says."""
    if not fields.boolean("use_sliding_window"):
        return windows.by_layer_types(fields, [False] * num_layers, off="use_sliding_window=false")
    return windows.by_layer_types(fields, list(unrotated(fields, num_layers)))


def factors(fields: Fields) -> dict[str, float]:
    """Return Granite's factors of the embedding, attention logits, what a layer adds, and logits."""
    return {
        "embedding_scale": fields.number("embedding_multiplier", default=1.0),
        "softmax_scale": fields.number("attention_multiplier", default=1.0),
        "residual_scale": fields.number("residual_multiplier", default=1.0),
        "logit_scale": 1.0 / fields.number("logits_scaling", default=1.0),
    }


PHI3_LAYERS = in_layers(
    INPUT_NORM,
    joined_qkv("self_attention.linear_qkv.weight", "self_attn.qkv_proj.weight", "hidden"),
    ATTENTION_OUTPUT,
    DENSE_NORM,
    fused_gated("mlp.linear_fc1.weight", "mlp.gate_up_proj.weight", "two_ffn", "hidden"),
    row("mlp.linear_fc2.weight", "mlp.down_proj.weight", "hidden", "ffn"),
)

APERTUS = Family(
    "apertus",
    EMBEDDING
    + in_layers(
        copy("input_layernorm.weight", "attention_layernorm.weight", "hidden", te=INPUT_NORM.te),
        *ATTENTION_WEIGHTS,
        copy("pre_mlp_layernorm.weight", "feedforward_layernorm.weight", "hidden", te=DENSE_NORM.te),
        *UNGATED,
        *(copy(f"mlp.activation_func.{name}", f"mlp.act_fn.{name}", "one") for name in ("alpha_p", "alpha_n")),
        *(copy(f"mlp.activation_func.{name}", f"mlp.act_fn.{name}") for name in ("beta", "eps")),
    )
    + OUTPUT,
    title="Apertus",
    differs="norms of each head of q and k; xIELU without a gate, whose slopes train",
    defaults={
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            **{"rope_type": "llama3", "rope_theta": 12e6, "factor": 8.0, "original_max_position_embeddings": 8192},
            **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
        },
    },
    fixed={"attention_bias": NO_LINEAR_BIAS},
    qk_norm=True,
    activation="xielu",
)
SMOLLM3 = Family(
    "smollm3",
    DENSE,
    title="SmolLM3",
    differs="every fourth layer without rotation, or those of `no_rope_layers`",
    absent_in_sglang=True,
    defaults={
        "num_key_value_heads": 4,
        "rope_theta": 2e6,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
        "use_sliding_window": False,
        "sliding_window": None,
        "layer_types": None,
    },
    bias_keys=("attention_bias", "mlp_bias"),
    tied=True,
    unrotated=unrotated,
    window=where_unrotated,
)
PHI3 = Family(
    "phi3",
    EMBEDDING + PHI3_LAYERS + OUTPUT,
    title="Phi-3",
    differs="q, k and v in one tensor, gate and up in another; rotation of a part of each head; a window unless null",
    defaults={"rms_norm_eps": 1e-5, "sliding_window": None},
    keys=("original_max_position_embeddings",),
    hub_code=("configuration_phi3", "modeling_phi3"),
    partial_rotary=True,
    window=windows.in_all_layers,
)
GRANITE = Family(
    "granite",
    DENSE,
    title="Granite",
    differs="factors of the embedding, attention logits, outputs of attention and MLP, and logits",
    keys=("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"),
    bias_keys=("attention_bias", "mlp_bias"),
    scales=factors,
)
MINISTRAL3 = Family(
    "ministral3",
    DENSE,
    title="Ministral 3",
    differs="YaRN, and queries that grow with the position (`llama_4_scaling_beta`); a window unless it is null",
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "rope_parameters": mistral_yarn(1e6, 16.0, 16384),
    },
    query_growth=True,
    window=windows.in_all_layers,
)
