"""Decoder layer with norms on outputs or a separate rotary embedding, which Megatron-Core's layer lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from mega_rl.engines.models.norm import RMSNorm
from mega_rl.engines.models.rope import PackedRotary

BiasDropoutAdd = Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]
BuildBiasDropoutAdd = Callable[[bool, bool], BiasDropoutAdd]


class DecoderLayer(TransformerLayer):
    """Transformer layer with norms on the outputs of attention and MLP, or with a separate rotary embedding.

    `post_norms`: `post_self_attn_layernorm` and `post_mlp_layernorm` act before the residual is added.
    `rope_theta`: base of this layer's rotary embedding; None takes the model's.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        *args: Any,
        post_norms: bool,
        rope_theta: float | None,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, submodules, *args, **kwargs)  # which differ between Megatron-Core's releases
        if post_norms:
            self.post_self_attn_layernorm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
            self.post_mlp_layernorm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
            self.self_attn_bda: BuildBiasDropoutAdd = _normed(self.post_self_attn_layernorm, get_bias_dropout_add)
            self.mlp_bda: BuildBiasDropoutAdd = _normed(self.post_mlp_layernorm, get_bias_dropout_add)
        self.rotary_pos_emb: PackedRotary | None = None
        if rope_theta is not None:
            rotary = RotaryEmbedding(
                config.kv_channels,
                rotary_percent=1.0,
                rotary_interleaved=config.rotary_interleaved,
                rotary_base=rope_theta,
                use_cpu_initialization=config.use_cpu_initialization,
                cp_group=self.pg_collection.cp,
            )
            self.rotary_pos_emb = PackedRotary(rotary)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Return (hidden states [S, B, H], context); the layer's own rotary embedding replaces `rotary_pos_emb`."""
        if self.rotary_pos_emb is not None:
            packed = kwargs.get("packed_seq_params")
            hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            length = self.rotary_pos_emb.get_rotary_seq_len(None, None, hidden, self.config, packed)
            kwargs["rotary_pos_emb"] = self.rotary_pos_emb(length)
        return super().forward(*args, **kwargs)


def _normed(norm: RMSNorm, bias_dropout_add: BuildBiasDropoutAdd) -> BuildBiasDropoutAdd:
    """Return Megatron-Core's residual connection with a norm before the addition."""

    def build(training: bool, fused: bool) -> BiasDropoutAdd:
        add = bias_dropout_add(training, fused)

        def apply(output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
            output, bias = output_with_bias
            return add((norm(output if bias is None else output + bias), None), residual, dropout)

        return apply

    return build
