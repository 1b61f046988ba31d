"""Self-attention of models whose query and key norms Megatron-Core does not support."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

from mega_rl.engines.models.rope import ONE_ROW


class JointNormAttention(SelfAttention):
    """Self-attention with norms over all heads together, which tensor parallelism cuts with the heads.

    From 0.18 such norms need `config.qk_layernorm`, and with that switch on `finalize_model_grads` takes every norm of
    queries and keys for whole on each tensor-parallel rank: it is on while the norms are built, and not later.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        assert not config.qk_layernorm
        config.qk_layernorm = True
        try:
            super().__init__(config, *args, **kwargs)
        finally:
            config.qk_layernorm = False


class LatentAttention(MLASelfAttention):
    """Latent attention whose norms and projections are those that the spec names.

    From 0.19 upstream decides anew: a model that does not compress its queries would get a second norm in front of
    them, or be refused. Packed queries and keys are turned by the positions of their tokens, as in other layers, also
    where Transformer Engine attends to them (see `mega_rl.engines.models.rope`).
    """

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, ...]:
        """Return upstream's tuple that begins with query, key and value: [T, heads, .] of packed tokens."""
        if packed_seq_params is not None:
            packed_seq_params = replace(packed_seq_params, qkv_format=ONE_ROW)
        made: tuple[Tensor, ...] = super().get_query_key_value_tensors(
            hidden_states, key_value_states, position_ids, packed_seq_params, **kwargs
        )
        return made

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """Return the classes to build, by name; Megatron-Core calls this from 0.19 on."""
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}
