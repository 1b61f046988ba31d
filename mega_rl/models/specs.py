"""Which modules make a decoder layer: Transformer Engine's where it is installed, else Megatron-Core's own and ours."""

from __future__ import annotations

import importlib.util
import logging

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from mega_rl.converters.plan import Spec
from mega_rl.errors import UserError
from mega_rl.models.attention import SDPACoreAttention
from mega_rl.models.norm import RMSNorm

log = logging.getLogger(__name__)


def choose_transformer_impl(requested: str, *, device_type: str) -> Spec:
    """ "te" or "local" for `model.transformer_impl`; asking for Transformer Engine where it cannot run is an error.

    Raises:
        UserError: `transformer_engine` requested without a CUDA device or without the package.
    """
    if requested == "local":
        return "local"
    available = device_type == "cuda" and importlib.util.find_spec("transformer_engine") is not None
    if requested == "auto":
        if not available:
            log.info("Transformer Engine not found: layers use the local spec (torch SDPA, torch RMSNorm)")
        return "te" if available else "local"
    if not available:
        raise UserError(
            f"model.transformer_impl={requested}: Transformer Engine needs a CUDA device and the package "
            "transformer-engine, which are not both here; use model.transformer_impl=auto or local"
        )
    return "te"


def decoder_spec(impl: Spec, *, num_layers: int, qk_norm: bool) -> ModuleSpec | TransformerBlockSubmodules:
    """Spec of a stage's decoder with `num_layers` layers; `impl` is "te" or "local"."""
    if impl == "te":
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=qk_norm)
    assert impl == "local"
    norm = RMSNorm if qk_norm else IdentityOp
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=ColumnParallelLinear,
                    core_attention=SDPACoreAttention,
                    linear_proj=RowParallelLinear,
                    q_layernorm=norm,
                    k_layernorm=norm,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=ModuleSpec(
                module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
            ),
            mlp_bda=get_bias_dropout_add,
            # Checkpoints carry Transformer Engine's names, so they load under either spec.
            sharded_state_dict_keys_map={
                "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
                "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
            },
        ),
    )
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=RMSNorm)
