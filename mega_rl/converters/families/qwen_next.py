"""Hybrids of gated delta nets and gated attention: Qwen3-Next and Qwen3.5, dense and with experts."""

from __future__ import annotations

from dataclasses import replace

from mega_rl.converters.architecture import DeltaNet
from mega_rl.converters.families.base import NO_LINEAR_BIAS, Family
from mega_rl.converters.families.dense import ATTENTION_WEIGHTS, EMBEDDING, INPUT_NORM, MLP, OUTPUT
from mega_rl.converters.families.fields import Fields
from mega_rl.converters.families.moe import EXPERTS, MOE_NORM, ROUTER, SHARED_GATE, qwen2_moe, shared_experts
from mega_rl.converters.families.rules import Rule, Source, col, copy, in_layers, row, sections, shares

IN_PROJ = "self_attention.in_proj.weight"
# Rows of Megatron-Core's input projection: queries, keys, values, gates, betas, alphas.
PARTS = ("delta_keys", "delta_keys", "delta_values", "delta_values", "delta_heads", "delta_heads")


def delta_net(fields: Fields, num_layers: int) -> DeltaNet | None:
    """Return the delta nets: all layers but every fourth (`full_attention_interval`), or as `layer_types` says."""
    interval = fields.size("full_attention_interval", default=4)
    kinds = fields.strings("layer_types", length=num_layers, allowed=("linear_attention", "full_attention"))
    every = [(i + 1) % interval != 0 for i in range(num_layers)]
    layers = [kind == "linear_attention" for kind in kinds] if kinds else every
    if layers != every and "full_attention_interval" in fields.raw and not fields.problems:
        fields.refuse("full_attention_interval", "layer_types, which transformers reads instead, say otherwise")
    names = "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim"
    keys, values, *sizes = (fields.size(f"linear_{name}") for name in names)
    if values % keys and not fields.problems:
        fields.refuse("linear_num_value_heads", f"it must be a multiple of linear_num_key_heads={keys}")
    return DeltaNet(tuple(layers), keys, values, *sizes) if any(layers) else None


def _layers(*in_proj: Source) -> tuple[Rule, ...]:
    """Return the rules of attention and of delta nets whose input projection has these sources."""
    qkv, _, *rest = ATTENTION_WEIGHTS
    gated_q = shares(qkv.sources[0].name, "q_and_gate", "hidden", parts=("q", "q"), groups="heads")
    attention = (INPUT_NORM, replace(qkv, sources=(*gated_q, *qkv.sources[1:])), *rest)
    conv = shares("linear_attn.conv1d.weight", "delta_qkv", "one", "conv_kernel", parts=PARTS[:3])
    delta = (
        replace(INPUT_NORM, te="self_attention.in_proj.layer_norm_weight"),
        sections(IN_PROJ, *in_proj),
        sections("self_attention.conv1d.weight", *conv),
        col("self_attention.dt_bias", "linear_attn.dt_bias", "delta_heads"),
        col("self_attention.A_log", "linear_attn.A_log", "delta_heads"),
        copy("self_attention.out_norm.weight", "linear_attn.norm.weight", "delta_head_dim"),
        row("self_attention.out_proj.weight", "linear_attn.out_proj.weight", "hidden", "delta_values"),
    )
    kinds = (("attention", attention), ("delta", delta))
    return in_layers(*(replace(rule, when=(*rule.when, kind)) for kind, rules in kinds for rule in rules))


NEXT_LAYERS = _layers(
    *shares("linear_attn.in_proj_qkvz.weight", "delta_qkvz", "hidden", parts=PARTS[:4], groups="delta_key_heads"),
    *shares("linear_attn.in_proj_ba.weight", "two_delta_heads", "hidden", parts=PARTS[4:], groups="delta_key_heads"),
)
LAYERS = _layers(
    *shares("linear_attn.in_proj_qkv.weight", "delta_qkv", "hidden", parts=PARTS[:3]),
    Source("linear_attn.in_proj_z.weight", ("delta_values", "hidden")),
    Source("linear_attn.in_proj_b.weight", ("delta_heads", "hidden")),
    Source("linear_attn.in_proj_a.weight", ("delta_heads", "hidden")),
)
MOE = in_layers(MOE_NORM, ROUTER, *EXPERTS, *shared_experts("mlp.shared_expert"), SHARED_GATE)

DEFAULTS = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "layer_types": None,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
MOE_DEFAULTS = {
    "intermediate_size": 5632,
    "num_key_value_heads": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "norm_topk_prob": True,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
FIXED = {
    "attention_bias": NO_LINEAR_BIAS,
    "attn_output_gate": ((True,), "attention without a gate is another model"),
}

QWEN3_NEXT = Family(
    "qwen3_next",
    EMBEDDING + NEXT_LAYERS + MLP + MOE + OUTPUT,
    title="Qwen3-Next",
    differs=(
        "gated delta nets in three of four layers, with a gate on the output of attention in the others; norms that "
        "multiply by 1 + weight, on q and k too; rotation of a quarter of a head; mixtures routed by a softmax, with a "
        "gated shared expert"
    ),
    untied_in_sglang=True,
    needed_by_sglang=("full_attention_interval",),
    megatron="0.19",
    defaults={**DEFAULTS, **MOE_DEFAULTS, "num_experts": 512, "num_experts_per_tok": 10},
    fixed=FIXED,
    qk_norm=True,
    zero_centered_norm=True,
    attention_gate=True,
    unread=(r"^mtp\.",),
    partial_rotary=True,
    moe=qwen2_moe,
    delta=delta_net,
)
QWEN3_5 = replace(
    QWEN3_NEXT,
    model_type="qwen3_5_text",
    rules=EMBEDDING + LAYERS + MLP + OUTPUT,
    title="Qwen3.5",
    differs="as Qwen3-Next, without mixtures",
    defaults={**DEFAULTS, "num_key_value_heads": 4},
    # The first two divide rotated dimensions among the axes of an image; a text has one position on all of them.
    keys=(
        "mrope_section",
        "mrope_interleaved",
        "mamba_ssm_dtype",
        "mtp_num_hidden_layers",
        "mtp_use_dedicated_embeddings",
    ),
    in_wrappers=("qwen3_5",),
    untied_in_sglang=False,
    moe=None,
)
QWEN3_5_MOE = replace(
    QWEN3_5,
    model_type="qwen3_5_moe_text",
    in_wrappers=("qwen3_5_moe",),
    rules=EMBEDDING + LAYERS + MOE + OUTPUT,
    title="Qwen3.5-MoE",
    differs="as Qwen3-Next",
    defaults={**DEFAULTS, **MOE_DEFAULTS, "num_experts": 256, "num_experts_per_tok": 8},
    fixed={
        **FIXED,
        "norm_topk_prob": ((True,), "its router normalises the weights of the chosen experts"),
        "decoder_sparse_step": ((1,), "every layer is a mixture"),
        "mlp_only_layers": (([],), "every layer is a mixture"),
    },
    moe=qwen2_moe,
)
