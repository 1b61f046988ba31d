"""Mixtures of experts with grouped-query attention and softmax routing: Mixtral, Qwen-MoE, OLMoE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mega_rl.converters.architecture import Moe
from mega_rl.converters.families import windows
from mega_rl.converters.families.base import NO_LINEAR_BIAS, ExpertNames, Family
from mega_rl.converters.families.dense import (
    ATTENTION,
    ATTENTION_WEIGHTS,
    EMBEDDING,
    INPUT_NORM,
    MLP,
    OUTPUT,
    QWEN_WINDOW,
)
from mega_rl.converters.families.fields import MOST_EXPERTS, Fields
from mega_rl.converters.families.rules import Rule, col, copy, fused_gated, gated, in_layers, row

EXPERT = "mlp.experts.local_experts.{expert}.linear_"  # parameters of one
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")

MOE_NORM = copy("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", "hidden", when=["moe"])
ROUTER = copy("mlp.router.weight", "mlp.gate.weight", "experts", "hidden", when=["moe"])


def experts(names: ExpertNames) -> tuple[Rule, ...]:
    """Return the rules of experts under these names: separate tensors, or one tensor per layer."""
    expert, gate_up = f"{names.block}.experts.{{expert}}.", (names.gate, names.up)
    fc1, fc2 = EXPERT + "fc1.weight", EXPERT + "fc2.weight"
    single, fused = ["moe", "per_expert"], ["moe", "fused_experts"]
    gates, downs = ("experts", "two_expert_ffn", "hidden"), ("experts", "hidden", "expert_ffn")
    return (
        gated(fc1, expert + "{part}.weight", "expert_ffn", "hidden", parts=gate_up, when=single),
        row(fc2, f"{expert}{names.down}.weight", "hidden", "expert_ffn", when=single),
        fused_gated(fc1, "mlp.experts.gate_up_proj", *gates, when=fused, stacked=True),
        row(fc2, "mlp.experts.down_proj", *downs, when=fused, stacked=True),
    )


EXPERTS = experts(ExpertNames())


def shared_experts(name: str) -> tuple[Rule, ...]:
    """Return the rules of the experts that every token passes."""
    when = ["moe", "shared_experts"]
    return (
        gated("mlp.shared_experts.linear_fc1.weight", name + ".{part}_proj.weight", "shared_ffn", "hidden", when=when),
        row("mlp.shared_experts.linear_fc2.weight", f"{name}.down_proj.weight", "hidden", "shared_ffn", when=when),
    )


SHARED_GATE = copy("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight", "one", "hidden", when=["moe"])


def num_experts(fields: Fields) -> int:
    """Return the number of routed experts under any of its names; refuse names that disagree."""
    given = {key: fields.raw[key] for key in EXPERT_KEYS if fields.raw.get(key) is not None}
    names = list(given) or [key for key in EXPERT_KEYS if key in fields.defaults] or [EXPERT_KEYS[0]]
    sizes = {fields.size(key, most=MOST_EXPERTS) for key in names}
    if len(sizes) > 1:
        fields.refuse(names[0], f"{' and '.join(names[1:])} beside it counts the same experts; remove the wrong one")
    return max(sizes)


def in_both_spellings(names: ExpertNames, rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """Return a layer's rules as transformers spells them, and as files with separate experts do."""
    return tuple(
        replace(rule, when=(*rule.when, spelling), sources=tuple(replace(s, name=spell(s.name)) for s in rule.sources))
        for spelling, spell in (("per_expert", names.on_disk), ("fused_experts", str))
        for rule in rules
    )


def expert_bias(name: str, *shape: str) -> Rule:
    """Return the rule of the corrections by which a router chooses experts."""
    rule = copy("mlp.router.expert_bias", name, *(shape or ("experts",)), when=["moe", "expert_bias"])
    return replace(rule, float32=True)


def mixture(
    fields: Fields, layers: list[bool], *, ffn: str = "moe_intermediate_size", chosen: str = "num_experts_per_tok"
) -> Moe | None:
    """Return the mixture of a softmax over all experts; None without layers.

    `ffn` and `chosen` name the keys of an expert's width and of the number of experts that are chosen.
    """
    if not any(layers):
        return None
    total, top_k = num_experts(fields), fields.size(chosen)
    if top_k > total and not fields.problems:
        fields.refuse(chosen, f"there are {total} experts")
    return Moe(tuple(layers), total, top_k, fields.size(ffn), score_before_topk=True)


def softmax_moe(fields: Fields, layers: list[bool], *, normalised: bool, ffn: str) -> Moe | None:
    """Return a `mixture` whose chosen weights add up to 1 if `normalised`."""
    moe = mixture(fields, layers, ffn=ffn)
    if moe is not None and normalised and moe.top_k == 1:
        reason = "weights that are normalised are all 1, and Megatron-Core refuses such a router"
        fields.refuse("num_experts_per_tok", reason)
    return None if moe is None else replace(moe, score_before_topk=not normalised)


def mixtral_moe(fields: Fields, num_layers: int) -> Moe | None:
    """Return the mixture of Mixtral: every layer is one; weights are normalised whatever config.json says."""
    return softmax_moe(fields, [True] * num_layers, normalised=True, ffn="intermediate_size")


def olmoe_moe(fields: Fields, num_layers: int) -> Moe | None:
    """Return the mixture of OLMoE: every layer. Refuses heads unlike hidden_size."""
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    if fields.size("head_dim", default=hidden // heads) * heads != hidden:
        fields.refuse("head_dim", "the norm over all query heads is as wide as hidden_size")
    normalised = fields.boolean("norm_topk_prob")
    return softmax_moe(fields, [True] * num_layers, normalised=normalised, ffn="intermediate_size")


def qwen_moe(fields: Fields, num_layers: int) -> Moe | None:
    """Return the mixture of Qwen3-MoE: every `decoder_sparse_step`-th layer but those of `mlp_only_layers`."""
    step, dense = fields.size("decoder_sparse_step"), fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(i, int) for i in dense):
        fields.refuse("mlp_only_layers", "must be a list of layers, counted from 0")
        dense = []
    layers = [i not in dense and (i + 1) % step == 0 for i in range(num_layers)]
    normalised = fields.boolean("norm_topk_prob", default=bool(fields.defaults.get("norm_topk_prob")))
    return softmax_moe(fields, layers, normalised=normalised, ffn="moe_intermediate_size")


def qwen2_moe(fields: Fields, num_layers: int) -> Moe | None:
    """Return the mixture of Qwen2-MoE: routed experts, and a gated shared expert for every token."""
    moe = qwen_moe(fields, num_layers)
    shared = fields.size("shared_expert_intermediate_size")
    return None if moe is None else replace(moe, shared_ffn_hidden_size=shared, shared_gate=True)


MIXTRAL_NAMES = ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2")
MIXTRAL_MOE = in_layers(MOE_NORM, *experts(MIXTRAL_NAMES)) + in_both_spellings(MIXTRAL_NAMES, in_layers(ROUTER))
MOE = in_layers(MOE_NORM, ROUTER, *EXPERTS)
# Norms over the queries and keys of all heads together are cut with the heads.
JOINT_NORM = (
    col("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", "q"),
    col("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", "kv"),
)

QWEN_MOE_DEFAULTS = {"decoder_sparse_step": 1, "mlp_only_layers": None, "norm_topk_prob": False, **QWEN_WINDOW}

MIXTRAL = Family(
    "mixtral",
    EMBEDDING + ATTENTION + MIXTRAL_MOE + OUTPUT,
    title="Mixtral",
    differs="mixtures in every layer, routed by a softmax over the chosen logits; a window unless it is null",
    untied_in_sglang=True,
    expert_names=MIXTRAL_NAMES,
    defaults={
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    window=windows.in_all_layers,
    moe=mixtral_moe,
)
QWEN2_MOE = Family(
    "qwen2_moe",
    EMBEDDING
    + ATTENTION
    + MLP
    + in_layers(MOE_NORM, ROUTER, *EXPERTS, *shared_experts("mlp.shared_expert"), SHARED_GATE)
    + OUTPUT,
    title="Qwen2-MoE",
    differs=(
        "biases on q, k and v; mixtures routed by a softmax over all logits, normalised as `norm_topk_prob` says, with "
        "a gated shared expert; dense layers between"
    ),
    untied_in_sglang=True,
    windows_in_mask_only=True,
    defaults={
        "num_key_value_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "qkv_bias": True,
        **QWEN_MOE_DEFAULTS,
    },
    qkv_bias="qkv_bias",
    window=windows.in_even_first_layers,
    moe=qwen2_moe,
)
QWEN3_MOE = Family(
    "qwen3_moe",
    EMBEDDING + ATTENTION + MLP + MOE + OUTPUT,
    title="Qwen3-MoE",
    differs=(
        "norms of each head of q and k; mixtures routed by a softmax over all logits, normalised as `norm_topk_prob` "
        "says; dense layers between"
    ),
    untied_in_sglang=True,
    defaults={
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        **QWEN_MOE_DEFAULTS,
    },
    fixed={"attention_bias": NO_LINEAR_BIAS},
    qk_norm=True,
    window=windows.if_enabled,
    moe=qwen_moe,
)
OLMOE = Family(
    "olmoe",
    EMBEDDING + in_layers(INPUT_NORM, *ATTENTION_WEIGHTS, *JOINT_NORM) + MOE + OUTPUT,
    title="OLMoE",
    differs="one norm over all heads of q, and of k; mixtures in every layer, routed by a softmax over all logits",
    untied_in_sglang=True,
    defaults={
        "rms_norm_eps": 1e-5,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
    fixed={
        "attention_bias": NO_LINEAR_BIAS,
        "clip_qkv": ((), "Megatron-Core has no clipping of queries, keys and values"),
    },
    moe=olmoe_moe,
    qk_norm_joint=True,
)


def ernie_moe(fields: Fields, num_layers: int) -> Moe | None:
    """Return the mixture of ERNIE 4.5: corrections choose among a softmax; the chosen weights are normalised."""
    first, last = fields.size("moe_layer_start_index", least=0), fields.get("moe_layer_end_index")
    last = num_layers - 1 if last == -1 else fields.size("moe_layer_end_index", least=0)
    moe = mixture(fields, [first <= i <= last for i in range(num_layers)], chosen="moe_k")
    if moe is None:
        return None
    shared = fields.size("moe_num_shared_experts", default=0, least=0) * moe.ffn_hidden_size
    floor = fields.number("moe_norm_min", default=1e-12)
    return replace(moe, shared_ffn_hidden_size=shared, expert_bias=True, weight_floor=floor)


# SGLang and transformers leave out the prediction layers of published files, and so does an export.
_LINEARS = ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
ERNIE_MTP = (
    *(f"model.mtp_{name}.0.weight" for name in ("emb_norm", "hidden_norm", "linear_proj")),
    *(f"model.mtp_block.0.{name}_layernorm.weight" for name in ("input", "post_attention")),
    *(f"model.mtp_block.0.{name}_proj.weight" for name in _LINEARS),
)
ERNIE_NAMES = ExpertNames(renamed=((".mlp.gate.moe_statics.", ".mlp.moe_statics."),))
ERNIE4_5_MOE = Family(
    "ernie4_5_moe",
    EMBEDDING
    + ATTENTION
    + MLP
    + in_layers(MOE_NORM, ROUTER, *EXPERTS, *shared_experts("mlp.shared_experts"))
    + in_both_spellings(
        ERNIE_NAMES, in_layers(expert_bias("mlp.gate.moe_statics.e_score_correction_bias", "one", "experts"))
    )
    + OUTPUT,
    title="ERNIE 4.5 MoE",
    differs=(
        "rotation of even with odd dimensions; mixtures behind the first layers, with shared experts and a softmax "
        "whose corrections enter the choice alone; prediction layers are left out"
    ),
    expert_names=ERNIE_NAMES,
    defaults={
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "moe_intermediate_size": 1536,
        "moe_k": 6,
        "moe_num_experts": 64,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_norm_min": 1e-12,
    },
    fixed={
        "use_bias": ((False,), "routers have no bias, and Megatron-Core has them on all linear layers or on none"),
        "moe_layer_interval": ((1,), "SGLang counts the layers between mixtures from another one"),
        "moe_use_aux_free": ((True,), "without it the code has corrections of zero"),
    },
    keys=("moe_capacity", "moe_gate", "num_nextn_predict_layers"),
    tied=True,
    rope_interleaved=True,
    moe=ernie_moe,
    hub_code=("configuration_ernie4_5_moe", "modeling_ernie4_5_moe", "tokenization_ernie4_5"),
    ignored=ERNIE_MTP,
)
