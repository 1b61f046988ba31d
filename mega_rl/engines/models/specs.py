"""Layer specs of Transformer Engine or of Megatron-Core and ours; choice of attention."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Mapping
from typing import Literal

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec, multi_latent_attention
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from mega_rl.config.needs import RequestedAttention, Role
from mega_rl.config.schema import ModelConfig
from mega_rl.converters.architecture import HFConfig, Mla, is_delta_net, is_moe
from mega_rl.converters.families import FAMILIES
from mega_rl.converters.plan.sharding import Spec
from mega_rl.engines.models.attention import CoreAttention
from mega_rl.engines.models.layer import (
    DecoderLayer,
    JointNormAttention,
    JointRMSNorm,
    LatentAttention,
    LatentRMSNorm,
    RMSNorm,
    Xielu,
)
from mega_rl.engines.models.moe import ExpertRowParallelLinear, Router
from mega_rl.errors import UserError
from mega_rl.parallel.accelerator.megatron_core import mtp_layer_field, submodules_of

# Names in the start-up table; Transformer Engine's are its backends.
Attention = Literal[
    "eager", "sdpa", "flash_attention_2", "transformers: eager", "transformers: sdpa",
    "te: auto", "te: flash", "te: fused", "te: unfused",
]  # fmt: skip
TE = "te: "

# Layers' origin -> attention asked for -> attention that runs.
_RUNS: dict[Spec, dict[str, Attention]] = {
    "local": {"eager": "eager", "sdpa": "sdpa"},
    "te": {"eager": "te: unfused", "sdpa": "te: fused", "flash_attention_2": "te: flash", "auto": "te: auto"},
    "hf": {"eager": "eager", "sdpa": "sdpa", "flash_attention_2": "flash_attention_2"},
}
_OWNERS: dict[Spec, str] = {
    "local": "Megatron-Core's layers without Transformer Engine",
    "te": "Transformer Engine's layers",
    "hf": "Hugging Face's models (engine.backend=fsdp)",
}
CAUSAL = {"attn_mask_type": AttnMaskType.causal}


def choose_transformer_impl(requested: str, *, device_type: str) -> Spec:
    """Return "te" or "local" for `engine.megatron.transformer_impl`.

    Raises UserError: `transformer_engine` requested without a CUDA device or without the package.
    """
    if requested == "local":
        return "local"
    available = device_type == "cuda" and _has_transformer_engine()
    if requested == "auto":
        return "te" if available else "local"
    if not available:
        raise UserError(
            f"engine.megatron.transformer_impl={requested}: Transformer Engine needs a CUDA device and the package "
            "transformer-engine, which are not both here; use engine.megatron.transformer_impl=auto or local"
        )
    return "te"


def check_recompute(impl: Spec, hf: HFConfig, model: ModelConfig) -> None:
    """Raise UserError for recomputation of grouped experts' activation in local layers, which have none."""
    if hf.moe is None:
        return
    selective = model.recompute == "selective"
    if impl == "local" and selective and "moe_act" in model.recompute_modules:
        raise UserError(
            "model.recompute_modules: moe_act is the activation of grouped experts, which Transformer Engine's layers "
            "have; with engine.megatron.transformer_impl=local recompute moe instead"
        )


def _has_transformer_engine() -> bool:
    return importlib.util.find_spec("transformer_engine") is not None


def _has_latent_attention() -> bool:
    """Return whether Megatron-Core's latent attention can be built of local layers here.

    Without Transformer Engine 0.16 takes a mock of it for the package, and later releases leave out the linear layer
    that is whole on every rank, which needs nothing of it. A CPU has patches for both.
    """
    mocked = multi_latent_attention.HAVE_TE and not _has_transformer_engine()
    return not mocked and multi_latent_attention.Linear is not None


def needs_local_spec(hf: HFConfig, *, cp_size: int = 1) -> list[str]:
    """Return the features of an architecture that only the local spec's modules support, in words.

    Transformer Engine passes keys round a ring of context-parallel ranks, and refuses windows there; its ways of
    communicating that take them refuse packed sequences, in part of its versions. Sinks it refuses in packed sequences.
    """
    return [
        what
        for what, there in {
            "norms on the outputs of attention and MLP": hf.post_norms,
            "a factor on the outputs of attention and MLP": hf.residual_scale != 1.0,
            "a separate rotation in sliding-window layers": hf.rope.local_theta is not None,
            "query and key norms over all heads together": hf.qk_norm_joint,
            "queries that grow with the position": hf.rope.yarn is not None and hf.rope.yarn.query_growth > 0,
            "a separate norm epsilon in latent attention": hf.mla is not None and hf.mla.norm_eps != hf.norm_eps,
            "an activation that trains": hf.activation == "xielu",
            "sliding windows over context parallelism": cp_size > 1 and hf.window is not None,
            "attention sinks in packed sequences": hf.sinks,
            "gated delta nets in packed sequences": hf.delta is not None,
            "a top-k indexer": hf.mla is not None and hf.mla.indexer is not None,
        }.items()
        if there
    ]


def decoder_spec(
    impl: Spec, hf: HFConfig, *, layers: range, pg_collection: ProcessGroupCollection
) -> TransformerBlockSubmodules:
    """Return the spec of a stage's decoder of `layers` (global); `impl` is "te" or "local".

    Raises UserError: the layers lack something that the architecture has, or something that they need themselves.
    """
    if impl == "local":
        if hf.mla is not None and not _has_latent_attention():
            raise UserError(
                f"model_type={hf.family}: on a CUDA device Megatron-Core's latent attention needs Transformer "
                "Engine to be installed, whichever layers are used; pip install mega_rl[gpu]"
            )
        specs = [_local_layer(hf, layer, pg_collection) for layer in layers]
        return TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm)
    lacking = needs_local_spec(hf, cp_size=pg_collection.cp.size())
    if lacking:
        raise UserError(
            f"engine.megatron.transformer_impl: Megatron-Core's Transformer Engine layers lack what {hf.family} "
            f"has ({', '.join(lacking)}); use engine.megatron.transformer_impl=local"
        )
    from megatron.core.extensions.transformer_engine import TENorm

    specs = [_te_layer(hf, layer) for layer in layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=TENorm)


def mtp_spec(impl: Spec, hf: HFConfig, *, pg_collection: ProcessGroupCollection) -> ModuleSpec:
    """Spec of the multi-token prediction block of the last stage."""
    norm: type = RMSNorm
    linear: type = ColumnParallelLinear
    if impl == "te":
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm

        norm, linear = TENorm, TEColumnParallelLinear
    inside = [
        _local_layer(hf, hf.num_layers + i, pg_collection) if impl == "local" else _te_layer(hf, hf.num_layers + i)
        for i in range(hf.mtp_layers)
    ]
    return ModuleSpec(
        module=MultiTokenPredictionBlock,
        submodules=MultiTokenPredictionBlockSubmodules(
            layer_specs=[
                ModuleSpec(
                    module=MultiTokenPredictionLayer,
                    submodules=MultiTokenPredictionLayerSubmodules(
                        enorm=norm, hnorm=norm, eh_proj=linear, layer_norm=norm, **{mtp_layer_field(): layer}
                    ),
                )
                for layer in inside
            ]
        ),
    )


def _te_layer(hf: HFConfig, layer: int) -> ModuleSpec:
    """Return an upstream layer of Transformer Engine with our router and latent attention; experts are grouped."""
    moe = hf.moe is not None and is_moe(hf, layer)
    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=hf.moe.num_experts if hf.moe is not None and moe else None,
        moe_grouped_gemm=True,
        qk_layernorm=hf.qk_norm or hf.mla is not None,
        multi_latent_attention=hf.mla is not None,
    )
    if hf.mla is not None:
        spec.submodules.self_attention.module = LatentAttention
    if moe:
        submodules_of(spec.submodules.mlp).router = Router
    return spec


def _local_layer(hf: HFConfig, layer: int, pg_collection: ProcessGroupCollection) -> ModuleSpec:
    """Return a layer of Megatron-Core's local modules with our core attention and norms."""
    moe = is_moe(hf, layer)
    local_rope = hf.rope.local_theta is not None and hf.window is not None and hf.window.layers[layer]
    special = hf.post_norms or local_rope or hf.residual_scale != 1.0
    norm = RMSNorm if hf.pre_norms else IdentityOp
    params = {
        "post_norms": hf.post_norms,
        "residual_scale": hf.residual_scale,
        "rope_theta": hf.rope.local_theta if local_rope else None,
    }
    return ModuleSpec(
        module=DecoderLayer if special else TransformerLayer,
        params=params if special else {},
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=_mixer(hf, layer, pg_collection),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=_experts() if moe else _mlp(hf, pg_collection),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=_te_names(hf, layer),
        ),
    )


def _te_names(hf: HFConfig, layer: int) -> dict[str, str]:
    """Return prefixes of a layer's names and their names in checkpoints, those of Transformer Engine."""
    names = {}
    if is_delta_net(hf, layer):
        names["input_layernorm."] = "self_attention.in_proj.layer_norm_"
    elif hf.mla is None:
        names["input_layernorm."] = "self_attention.linear_qkv.layer_norm_"
    else:
        names["self_attention.q_layernorm."] = "self_attention.linear_q_up_proj.layer_norm_"
        names["self_attention.kv_layernorm."] = "self_attention.linear_kv_up_proj.layer_norm_"
    if not is_moe(hf, layer):
        names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    return names


def _mixer(hf: HFConfig, layer: int, pg_collection: ProcessGroupCollection) -> ModuleSpec:
    """Return what mixes the tokens of a layer: attention, latent attention or a gated delta net."""
    if is_delta_net(hf, layer):
        from mega_rl.engines.models.delta_net import delta_net_spec  # Megatron-Core 0.16 lacks it

        return delta_net_spec(hf.family)
    return _attention(hf, pg_collection) if hf.mla is None else _latent_attention(hf.mla)


def _attention(hf: HFConfig, pg_collection: ProcessGroupCollection) -> ModuleSpec:
    norms: list[type | ModuleSpec] = [RMSNorm if hf.qk_norm else IdentityOp] * 2
    if hf.qk_norm_joint:
        heads = (hf.num_heads, hf.num_kv_heads)
        norms = [ModuleSpec(module=JointRMSNorm, params={"heads": n, "pg_collection": pg_collection}) for n in heads]
    return ModuleSpec(
        module=JointNormAttention if hf.qk_norm_joint else SelfAttention,
        params=CAUSAL,
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=CoreAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=norms[0],
            k_layernorm=norms[1],
        ),
    )


def _latent_attention(mla: Mla) -> ModuleSpec:
    """Keep down projections whole on every rank; upstream's local spec cuts them."""
    core: type | ModuleSpec = CoreAttention
    if mla.indexer is not None:
        from mega_rl.engines.models.sparse_attention import sparse_attention_spec  # Megatron-Core 0.16 lacks it

        core = sparse_attention_spec()
    norm = ModuleSpec(module=LatentRMSNorm, params={"latent_eps": mla.norm_eps})
    return ModuleSpec(
        module=LatentAttention,
        params=CAUSAL,
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=ColumnParallelLinear,
            linear_q_down_proj=Linear,
            linear_q_up_proj=ColumnParallelLinear,
            linear_kv_down_proj=Linear,
            linear_kv_up_proj=ColumnParallelLinear,
            core_attention=core,
            linear_proj=RowParallelLinear,
            q_layernorm=norm,
            kv_layernorm=norm,
        ),
    )


def _mlp(hf: HFConfig, pg_collection: ProcessGroupCollection) -> ModuleSpec:
    own = ModuleSpec(module=Xielu, params={"tp_group": pg_collection.tp}) if hf.activation == "xielu" else None
    linears = {"linear_fc1": ColumnParallelLinear, "linear_fc2": RowParallelLinear}
    return ModuleSpec(module=MLP, submodules=MLPSubmodules(**linears, activation_func=own))


def _experts() -> ModuleSpec:
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    expert = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=ExpertRowParallelLinear)
    return ModuleSpec(
        module=MoELayer,
        submodules=MoESubmodules(
            router=Router,
            experts=ModuleSpec(module=SequentialMLP, submodules=expert),
            shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=linears),
        ),
    )


def choose_attention(requested: str, *, key: str, hf: HFConfig, impl: Spec, device_type: str, dtype: str) -> Attention:
    """Return the attention for setting `key` of value `requested`, one of `config.setting.ATTENTION`.

    "auto" leaves the choice to Transformer Engine in its layers; elsewhere it is FlashAttention in Hugging Face's
    models where that can run, else sdpa. `dtype` is "bf16" or "fp32".

    Raises UserError: the requested attention cannot run here; with the reasons and the available ones.
    """
    lacking = {word: _lacking(word, hf, impl, device_type, dtype) for word in ("flash_attention_2", "sdpa", "eager")}
    there = [word for word, reasons in lacking.items() if not reasons]
    runs = _RUNS[impl]
    if requested == "auto":
        return runs.get("auto") or runs[there[0]]
    if lacking[requested]:
        raise UserError(
            f"{key}={requested} cannot run in {_OWNERS[impl]}: it needs {' and '.join(lacking[requested])}; "
            f"available here: {', '.join(['auto', *reversed(there)])}"
        )
    return runs[requested]


def check_one_backend(asked: Mapping[Role, RequestedAttention]) -> None:
    """Check that models of these roles with Transformer Engine's layers can share a process.

    Megatron-Core passes the backend to Transformer Engine through the environment, which all models of a process share,
    and every value of the setting is another backend.

    Raises UserError: two roles ask for different ones.
    """
    (first, its), *others = asked.items()
    for role, own in others:
        if own.word != its.word:
            raise UserError(
                f"{its.key}={its.word} ({first}) and {own.key}={own.word} ({role}): Transformer Engine has one backend "
                "for all models of a process; ask for the same in both, or set engine.megatron.transformer_impl=local"
            )


def _lacking(word: str, hf: HFConfig, impl: Spec, device_type: str, dtype: str) -> list[str]:
    """Name the needs of attention `word` that this machine or model does not meet."""
    needs: dict[str, bool] = {}
    if word == "flash_attention_2" and impl == "local":
        needs["Transformer Engine (engine.megatron.transformer_impl) or engine.backend=fsdp"] = False
    elif word == "flash_attention_2":
        needs["a CUDA device"] = device_type == "cuda"
        needs["model.dtype=bf16"] = dtype == "bf16"
        needs["the package flash-attn"] = _has_flash_attn()
        unseen_windows = impl == "hf" and hf.window is not None and FAMILIES[hf.family].windows_in_mask_only
        needs[f"use_sliding_window=false in a model of model_type={hf.family}"] = not unseen_windows
    elif word == "sdpa" and impl == "te":
        needs["model.dtype=bf16"] = dtype == "bf16"  # its fused kernels are cuDNN's
    return [what for what, here in needs.items() if not here]


def _has_flash_attn() -> bool:
    """Return whether FlashAttention 2 is installed: other versions are other packages, some with the same module."""
    try:
        importlib.metadata.version("flash-attn")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
