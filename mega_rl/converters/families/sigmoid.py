"""Mixtures of experts with grouped-query attention and sigmoid routing: dots.llm1, MiniMax-M2, Hunyuan 3."""

from __future__ import annotations

from mega_rl.converters.architecture import Moe
from mega_rl.converters.families import windows
from mega_rl.converters.families.base import NO_LINEAR_BIAS, ExpertNames, Family
from mega_rl.converters.families.deepseek import (
    MTP,
    MTP_REPEATED,
    SHARED_MOE,
    SIGMOID_ROUTER,
    by_mlp_types,
    deepseek_v3_moe,
    sigmoid_moe,
)
from mega_rl.converters.families.dense import ATTENTION, ATTENTION_WEIGHTS, EMBEDDING, INPUT_NORM, MLP, OUTPUT
from mega_rl.converters.families.fields import Fields
from mega_rl.converters.families.moe import (
    EXPERTS,
    JOINT_NORM,
    MIXTRAL_MOE,
    MIXTRAL_NAMES,
    MOE_NORM,
    ROUTER,
    expert_bias,
    in_both_spellings,
    shared_experts,
)
from mega_rl.converters.families.rules import copy, in_layers, in_mtp_layers, of_mtp
from mega_rl.untrusted import is_number

CORRECTION = expert_bias("mlp.e_score_correction_bias")
DOTS1 = Family(
    "dots1",
    EMBEDDING + ATTENTION + MLP + SHARED_MOE + OUTPUT,
    title="dots.llm1",
    differs=(
        "norms of each head of q and k; windows from `max_window_layers` on; mixtures with sigmoid routing and shared "
        "experts behind the first layers"
    ),
    absent_in_sglang=True,
    defaults={
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 62,
        "layer_types": None,
        "n_group": 1,
        "topk_group": 1,
        "n_routed_experts": None,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 0,
    },
    keys=("n_shared_experts", "num_experts_per_tok"),
    fixed={"attention_bias": NO_LINEAR_BIAS, **SIGMOID_ROUTER},
    qk_norm=True,
    window=windows.from_a_layer_on,
    moe=deepseek_v3_moe,
    hub_code=("configuration_dots1", "modeling_dots1"),
)


def minimax_moe(fields: Fields, num_layers: int) -> Moe | None:
    """Return the mixture of MiniMax-M2: every layer is one, without shared experts.

    Refuses a `rotary_dim`, which only SGLang reads, that is not the part of a head that transformers rotates.
    """
    rotated, head_dim = fields.get("rotary_dim"), fields.size("head_dim")
    stated = fields.object("rope_parameters").get("partial_rotary_factor", fields.get("partial_rotary_factor"))
    share = 1.0 if stated is None else stated
    if rotated is not None and (not is_number(share) or rotated != int(head_dim * share)):
        fix = f"add partial_rotary_factor={rotated}/{head_dim} to rope_parameters, or remove it"
        fields.refuse("rotary_dim", f"transformers does not read it and would rotate another part of a head; {fix}")
    return sigmoid_moe(fields, [True] * num_layers, ffn="intermediate_size")


ALWAYS = ((True,), "the code of this family has it")
MINIMAX_M2 = Family(
    "minimax_m2",
    EMBEDDING
    + in_layers(INPUT_NORM, *ATTENTION_WEIGHTS, *JOINT_NORM)
    + MIXTRAL_MOE
    + in_both_spellings(MIXTRAL_NAMES, in_layers(CORRECTION))
    + OUTPUT,
    title="MiniMax-M2",
    differs=(
        "one norm over all heads of q, and of k; rotation of a part of each head; mixtures with sigmoid routing in "
        "every layer"
    ),
    untied_in_sglang=True,
    needed_by_sglang=("use_qk_norm", "use_routing_bias", "rotary_dim"),
    expert_names=MIXTRAL_NAMES,
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 5e6,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "rotary_dim": None,
    },
    fixed={
        "use_qk_norm": ALWAYS,
        "use_routing_bias": ALWAYS,
        "qk_norm_type": (("per_layer",), "the code norms all heads together"),
        "scoring_func": SIGMOID_ROUTER["scoring_func"],
        "shared_intermediate_size": ((0,), "the code has no shared experts"),
    },
    # Published files speak of prediction layers that they do not hold.
    keys=("use_mtp", "num_mtp_modules", "mtp_transformer_layers", "attn_type_list"),
    qk_norm_joint=True,
    partial_rotary=True,
    moe=minimax_moe,
    hub_code=("configuration_minimax_m2", "modeling_minimax_m2"),
)

HY_V3_NAMES = ExpertNames(
    renamed=(
        (".mlp.gate.", ".mlp.router.gate."),
        (".mlp.e_score_correction_bias", ".mlp.expert_bias"),
        (".mlp.shared_experts.", ".mlp.shared_mlp."),
    )
)
HY_V3_LAYERS = (
    ATTENTION
    + MLP
    + in_layers(MOE_NORM, *EXPERTS)
    + in_both_spellings(HY_V3_NAMES, in_layers(ROUTER, CORRECTION, *shared_experts("mlp.shared_experts")))
)


def hy_v3_moe(fields: Fields, num_layers: int) -> Moe | None:
    """Return the mixture of Hunyuan 3: layers as `mlp_layer_types` says, `num_shared_experts` for every token."""
    shared = fields.size("num_shared_experts", default=0, least=0) * fields.size("moe_intermediate_size")
    return sigmoid_moe(fields, by_mlp_types(fields, num_layers), shared=shared, scaling="router_scaling_factor")


# Sums that are float32 in low precision, and what transformers does not read.
HY_V3_UNREAD = (
    "enable_attention_fp32_softmax", "enable_lm_head_fp32", "enable_moe_fp32_combine", "use_grouped_mm",
    "expert_hidden_dim", "eod_token_id",
)  # fmt: skip
HY_V3 = Family(
    "hy_v3",
    EMBEDDING
    + HY_V3_LAYERS
    + OUTPUT
    + in_mtp_layers(HY_V3_LAYERS)
    + MTP[:3]
    + of_mtp(copy("final_layernorm.weight", "final_layernorm.weight", "hidden")),
    title="Hunyuan 3",
    differs=(
        "norms of each head of q and k; mixtures with sigmoid routing and shared experts where `mlp_layer_types` says; "
        "MTP"
    ),
    needed_by_sglang=("qk_norm", "route_norm", "first_k_dense_replace"),
    expert_names=HY_V3_NAMES,
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 11158840.0,
        "initializer_range": 0.006,
        "mlp_layer_types": None,
        "first_k_dense_replace": None,
        "num_experts": 192,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "moe_intermediate_size": 1536,
        "router_scaling_factor": 2.826,
    },
    fixed={
        "attention_bias": NO_LINEAR_BIAS,
        "mlp_bias": NO_LINEAR_BIAS,
        **dict.fromkeys(("qk_norm", "route_norm", "moe_router_use_sigmoid", "moe_router_enable_expert_bias"), ALWAYS),
    },
    keys=HY_V3_UNREAD,
    qk_norm=True,
    moe=hy_v3_moe,
    mtp_ignored=MTP_REPEATED,
)
