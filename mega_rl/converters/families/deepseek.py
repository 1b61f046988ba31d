"""DeepSeek, Moonlight, Kimi K2: latent attention, sigmoid routing with groups, an indexer."""

from __future__ import annotations

from dataclasses import replace

from mega_rl.converters.architecture import Indexer, Mla, Moe
from mega_rl.converters.families.base import NO_LINEAR_BIAS, Family, KnownBug
from mega_rl.converters.families.dense import EMBEDDING, MLP, OUTPUT, mistral_yarn
from mega_rl.converters.families.fields import MOST_LAYERS, Fields
from mega_rl.converters.families.moe import EXPERTS, MOE_NORM, ROUTER, expert_bias, mixture, shared_experts, softmax_moe
from mega_rl.converters.families.rules import col, copy, in_layers, in_mtp_layers, of_mtp, row

# SGLang fuses the two down projections as they arrive, so they are exported together.
TOGETHER = "mla_down"
LATENT_ATTENTION = in_layers(
    copy("input_layernorm.weight", "input_layernorm.weight", "hidden"),
    col("self_attention.linear_q_proj.weight", "self_attn.q_proj.weight", "q", "hidden", when=["no_q_rank"]),
    copy(
        "self_attention.linear_q_down_proj.weight",
        "self_attn.q_a_proj.weight",
        "q_rank",
        "hidden",
        when=["q_rank"],
        together=TOGETHER,
    ),
    copy(
        "self_attention.linear_kv_down_proj.weight",
        "self_attn.kv_a_proj_with_mqa.weight",
        "kv_down",
        "hidden",
        together=TOGETHER,
    ),
    copy(
        "self_attention.q_layernorm.weight",
        "self_attn.q_a_layernorm.weight",
        "q_rank",
        te="self_attention.linear_q_up_proj.layer_norm_weight",
        when=["q_rank"],
    ),
    col("self_attention.linear_q_up_proj.weight", "self_attn.q_b_proj.weight", "q", "q_rank", when=["q_rank"]),
    copy(
        "self_attention.kv_layernorm.weight",
        "self_attn.kv_a_layernorm.weight",
        "kv_rank",
        te="self_attention.linear_kv_up_proj.layer_norm_weight",
    ),
    col("self_attention.linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight", "kv_up", "kv_rank"),
    row("self_attention.linear_proj.weight", "self_attn.o_proj.weight", "hidden", "o"),
)

SHARED_MOE = in_layers(
    MOE_NORM, ROUTER, expert_bias("mlp.gate.e_score_correction_bias"), *EXPERTS, *shared_experts("mlp.shared_experts")
)

MTP = of_mtp(
    copy("enorm.weight", "enorm.weight", "hidden"),
    copy("hnorm.weight", "hnorm.weight", "hidden"),
    col("eh_proj.weight", "eh_proj.weight", "hidden", "two_hidden"),
    copy("final_layernorm.weight", "shared_head.norm.weight", "hidden"),
)
MTP_REPEATED = ("model.layers.{layer}.embed_tokens.weight", "model.layers.{layer}.shared_head.head.weight")

CHOICE, ON_DISK = "self_attention.core_attention.indexer.", "self_attn.indexer."
INDEXER = in_layers(
    copy(f"{CHOICE}linear_wq_b.weight", f"{ON_DISK}wq_b.weight", "index_q", "q_rank"),
    copy(f"{CHOICE}linear_wk.weight", f"{ON_DISK}wk.weight", "index_dim", "hidden"),
    copy(f"{CHOICE}k_norm.weight", f"{ON_DISK}k_norm.weight", "index_dim"),
    copy(f"{CHOICE}k_norm.bias", f"{ON_DISK}k_norm.bias", "index_dim"),
    copy(f"{CHOICE}linear_weights_proj.weight", f"{ON_DISK}weights_proj.weight", "index_heads", "hidden"),
)

LAYERS = LATENT_ATTENTION + MLP + SHARED_MOE
SPARSE_LAYERS = LAYERS + tuple(replace(rule, frozen=True) for rule in INDEXER)
NO_ATTENTION_BIAS = {"attention_bias": NO_LINEAR_BIAS}
SIGMOID_ROUTER = {
    "topk_method": (("noaux_tc",), "this family chooses experts with noaux_tc"),
    "scoring_func": (("sigmoid",), "this family has sigmoid scores"),
}
INTERLEAVED = "indexer_rope_interleave"
SHARED_CHOICE = "layers that take the choice of another layer are not supported yet"
ONE_FREQUENCY = ((1,), "every layer after first_k_dense_replace is a mixture")


def latent_sizes(query: int, key_value: int, nope: int, rope: int, value: int) -> dict[str, object]:
    """Return defaults of latent attention: both ranks, and a head's sizes."""
    names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return dict(zip(names, (query, key_value, nope, rope, value), strict=True))


def routed(experts: int, chosen: int, width: int, scaling: float, **more: object) -> dict[str, object]:
    """Return defaults of a mixture with a shared expert and normalised weights."""
    names = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "routed_scaling_factor")
    usual = {"n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True}
    return dict(zip(names, (experts, chosen, width, scaling), strict=True)) | usual | more


def latent(fields: Fields) -> Mla:
    """Return the sizes of latent attention; refuse grouped heads, which the code lacks."""
    heads = fields.size("num_attention_heads")
    if fields.size("num_key_value_heads", default=heads) != heads:
        fields.refuse("num_key_value_heads", f"latent attention has one per attention head, {heads}")
    return Mla(
        q_lora_rank=None if fields.get("q_lora_rank") is None else fields.size("q_lora_rank"),
        kv_lora_rank=fields.size("kv_lora_rank"),
        qk_nope_head_dim=fields.size("qk_nope_head_dim"),
        qk_rope_head_dim=fields.size("qk_rope_head_dim"),
        v_head_dim=fields.size("v_head_dim"),
    )


def sparse_latent(fields: Fields) -> Mla:
    """Return the sizes of latent attention and of its indexer, which reads the compressed queries."""
    mla, layers = latent(fields), fields.size("num_hidden_layers", most=MOST_LAYERS)
    if mla.q_lora_rank is None:
        fields.refuse("q_lora_rank", "the indexer reads compressed queries; it must be a positive integer")
    fields.strings("layer_types", length=layers, allowed=("deepseek_sparse_attention", "indexed_attention"))
    if "shared" in (fields.strings("indexer_types", length=layers, allowed=("full", "shared")) or ()):
        fields.refuse("indexer_types", SHARED_CHOICE)
    heads, size, chosen = (fields.size(f"index_{name}") for name in ("n_heads", "head_dim", "topk"))
    return replace(mla, indexer=Indexer(heads, size, chosen, bool(fields.get(INTERLEAVED))))


def after_dense(fields: Fields, num_layers: int) -> list[bool]:
    """Return, layer by layer, whether it is a mixture: all but the first `first_k_dense_replace` are."""
    dense = fields.size("first_k_dense_replace", least=0)
    return [i >= dense for i in range(num_layers)]


def by_mlp_types(fields: Fields, num_layers: int) -> list[bool]:
    """Return which layers `mlp_layer_types` makes mixtures; without it all but the first.

    SGLang reads `first_k_dense_replace` and transformers does not: if config.json has both, they must agree.
    """
    kinds = fields.strings("mlp_layer_types", length=num_layers, allowed=("dense", "sparse"))
    layers = [i > 0 for i in range(num_layers)] if kinds is None else [kind == "sparse" for kind in kinds]
    if fields.get("first_k_dense_replace") is not None and after_dense(fields, num_layers) != layers:
        where = ", ".join(str(i) for i, mixture in enumerate(layers) if not mixture) or "none"
        fields.refuse("first_k_dense_replace", f"by mlp_layer_types the layers without experts are {where}")
    return layers


def shared_width(fields: Fields) -> int:
    """Return the width of all shared experts together."""
    return fields.size("n_shared_experts", default=0, least=0) * fields.size("moe_intermediate_size")


def deepseek_v2_moe(fields: Fields, num_layers: int) -> Moe | None:
    """Return the mixture of DeepSeek-V2 and Mistral 4: the best of a softmax over all.

    Refuses groups of experts, which the method of the first scores by the best expert of each.
    """
    if fields.get("topk_method") == "group_limited_greedy" and fields.size("n_group", default=1) != 1:
        reason = "Megatron-Core scores a group by the sum of its best experts, this method by the best one"
        fields.refuse("topk_method", reason)
    normalised = fields.get("norm_topk_prob") is True
    moe = softmax_moe(fields, after_dense(fields, num_layers), normalised=normalised, ffn="moe_intermediate_size")
    if moe is None:
        return None
    scaling = fields.number("routed_scaling_factor", default=1.0)
    return replace(moe, shared_ffn_hidden_size=shared_width(fields), scaling=scaling)


def deepseek_v3_moe(fields: Fields, num_layers: int) -> Moe | None:
    """Return the mixture of DeepSeek-V3, GLM-4-MoE and dots.llm1: all but the first layers."""
    return sigmoid_moe(fields, after_dense(fields, num_layers), shared=shared_width(fields))


def sparse_moe(fields: Fields, num_layers: int) -> Moe | None:
    """Return the mixture of DeepSeek-V3 behind the first layers, or in those that `mlp_layer_types` names."""
    layers = after_dense if fields.get("mlp_layer_types") is None else by_mlp_types
    return sigmoid_moe(fields, layers(fields, num_layers), shared=shared_width(fields))


def sigmoid_moe(
    fields: Fields,
    layers: list[bool],
    *,
    shared: int = 0,
    ffn: str = "moe_intermediate_size",
    scaling: str = "routed_scaling_factor",
) -> Moe | None:
    """Return the mixture of a sigmoid router in these layers; None without such layers.

    Sigmoid scores with a correction per expert choose among the best groups; weights are normalised and scaled.
    `shared` is the width of all shared experts, `ffn` and `scaling` name the keys of an expert's width and the factor.
    """
    moe = mixture(fields, layers, ffn=ffn)
    if moe is None:
        return None
    normalised = fields.boolean("norm_topk_prob", default=fields.defaults.get("norm_topk_prob") is not False)
    if normalised == (moe.top_k == 1):
        reason = f"Megatron-Core normalises sigmoid weights unless one expert is chosen, here {moe.top_k}"
        fields.refuse("norm_topk_prob", reason)
    groups, best = _groups(fields, moe.num_experts, moe.top_k)
    return replace(
        moe,
        shared_ffn_hidden_size=shared,
        score="sigmoid",
        expert_bias=True,
        scaling=fields.number(scaling, default=1.0),
        num_groups=groups,
        topk_groups=best,
    )


def _groups(fields: Fields, total: int, top_k: int) -> tuple[int | None, int | None]:
    """Return (number of groups, number of kept groups), both None if every group is kept."""
    groups, best = fields.size("n_group", default=1), fields.size("topk_group", default=1)
    if best > groups or total % groups:
        fields.refuse("n_group", f"it must divide the {total} experts and be at least topk_group={best}")
        return None, None
    if best == groups:
        return None, None
    if top_k // best != 2:
        rule = f"num_experts_per_tok // topk_group = {top_k} // {best}"
        fields.refuse(
            "topk_group", f"Megatron-Core scores a group by its best {rule} experts, this model by its best 2"
        )
    elif total // groups < 2:
        fields.refuse("n_group", "a group is scored by its best 2 experts and must have as many")
    return groups, best


YARN_BUG = KnownBug(
    "5.15.0",
    lambda hf: hf.rope.yarn is not None and bool(hf.rope.yarn.mscale_all_dim),
    "transformers before 5.15 leaves yarn's factor mscale^2 out of the softmax scale of deepseek_v2 "
    "(fixed by huggingface/transformers#47435)",
)


def without_yarn(fields: Fields) -> dict[str, float]:
    """Return Mistral 4's factor of attention logits, into which YaRN does not enter."""
    rope = fields.object("rope_parameters")
    if rope.get("mscale") != rope.get("mscale_all_dim"):
        fields.refuse("rope_parameters", "mscale must be mscale_all_dim, so that YaRN does not scale the rotation")
    return {"softmax_scale": (fields.size("qk_nope_head_dim") + fields.size("qk_rope_head_dim")) ** -0.5}


DEEPSEEK_V2 = Family(
    "deepseek_v2",
    EMBEDDING + LAYERS + OUTPUT,
    title="DeepSeek-V2",
    differs=(
        "latent attention; mixtures with softmax routing without groups and shared experts, behind the first layers"
    ),
    known_bugs=(YARN_BUG,),
    defaults={
        "first_k_dense_replace": 0,
        **latent_sizes(1536, 512, 128, 64, 128),
        "n_group": None,
        "topk_group": None,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
        "moe_intermediate_size": 1407,
    },
    keys=("num_experts_per_tok", "qk_head_dim"),
    fixed={
        **NO_ATTENTION_BIAS,
        "mlp_bias": ((False,), "shared experts and attention have no bias, and Megatron-Core has all or none"),
        "norm_topk_prob": ((False,), "transformers ignores it and the model's own code does not; it is ambiguous"),
        "topk_method": (("greedy", "group_limited_greedy"), "this family has greedy and group_limited_greedy"),
        "scoring_func": (("softmax",), "this family has softmax scores"),
        "moe_layer_freq": ONE_FREQUENCY,
    },
    mla=latent,
    moe=deepseek_v2_moe,
    hub_code=("configuration_deepseek", "modeling_deepseek", "tokenization_deepseek_fast"),
)
DEEPSEEK_V3 = Family(
    "deepseek_v3",
    EMBEDDING + LAYERS + OUTPUT + in_mtp_layers(LAYERS) + MTP,
    title="DeepSeek-V3",
    differs=(
        "latent attention; mixtures with sigmoid routing, groups, a bias per expert and shared experts, behind the "
        "first layers; MTP; fp8 sources. Moonlight is of this family"
    ),
    defaults={
        "num_key_value_heads": 128,
        "first_k_dense_replace": 3,
        **latent_sizes(1536, 512, 128, 64, 128),
        **routed(256, 8, 2048, 2.5, n_group=8, topk_group=4),
    },
    fixed={
        **NO_ATTENTION_BIAS,
        "rope_interleave": ((True,), "Megatron-Core rotates neighbouring dimensions in latent attention"),
        **SIGMOID_ROUTER,
        "moe_layer_freq": ONE_FREQUENCY,
    },
    keys=("qk_head_dim",),
    mla=latent,
    moe=deepseek_v3_moe,
    hub_code=("configuration_deepseek", "modeling_deepseek", "tokenization_moonshot", "tokenization_kimi"),
    mtp_ignored=MTP_REPEATED,
)
KIMI_K2 = replace(
    DEEPSEEK_V3,
    model_type="kimi_k2",
    title="Kimi K2",
    differs="what DeepSeek-V3 does under another name; its tokenizer is code, so add a tokenizer.json",
    stand_in="deepseek_v3",
)
MISTRAL4 = Family(
    "mistral4",
    EMBEDDING + LAYERS + OUTPUT,
    title="Mistral 4",
    differs="latent attention, whose queries grow with the position; mixtures with softmax routing and shared experts",
    absent_in_sglang=True,
    defaults={
        "num_key_value_heads": 32,
        "first_k_dense_replace": 0,
        **latent_sizes(1024, 256, 64, 64, 128),
        **routed(128, 4, 2048, 1.0),
        "rope_parameters": mistral_yarn(1e4, 128.0, 8192),
    },
    fixed={
        **NO_ATTENTION_BIAS,
        "rope_interleave": DEEPSEEK_V3.fixed["rope_interleave"],
        **dict.fromkeys(
            ("n_group", "topk_group"), ((1,), "Megatron-Core has groups of experts for sigmoid scores only")
        ),
    },
    keys=("qk_head_dim",),
    query_growth=True,
    mla=latent,
    moe=deepseek_v2_moe,
    scales=without_yarn,
    fused_experts=True,
)
DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    model_type="deepseek_v32",
    rules=EMBEDDING + SPARSE_LAYERS + OUTPUT + in_mtp_layers(SPARSE_LAYERS) + MTP,
    title="DeepSeek-V3.2",
    differs="what DeepSeek-V3 does; an indexer chooses the tokens that each token attends to",
    megatron="0.19",
    defaults={
        **DEEPSEEK_V3.defaults,
        "mlp_layer_types": None,
        "num_experts": 256,
        INTERLEAVED: False,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 2048,
    },
    fixed={
        **DEEPSEEK_V3.fixed,
        INTERLEAVED: ((False,), "transformers rotates the first half of the indexer's dimensions with the second"),
    },
    keys=("qk_head_dim", "layer_types"),
    hub_code=(),
    mla=sparse_latent,
    moe=sparse_moe,
)
