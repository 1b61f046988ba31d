"""Decoder layer with norms or factors on outputs or its own rotary embedding, which Megatron-Core's layer lacks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer import MegatronModule, TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import rms_norm

from mega_rl.engines.models.rope import ONE_ROW, PackedRotary


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm over the last dimension whose weight is marked for sequence parallelism.

    Megatron-Core's own torch wrapper (`megatron.core.transformer.torch_norm.WrappedTorchNorm`) refuses
    `sequence_parallel`. Under it each tensor-parallel rank normalises its slice of the sequence, so the weight's
    gradient is a partial sum; the `sequence_parallel` mark makes `finalize_model_grads` add the parts.
    The constructor takes the arguments that Megatron-Core's layers pass to a norm. With
    `config.layernorm_zero_centered_gamma` it multiplies by 1 + weight, in float32.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.zero_centered = config.layernorm_zero_centered_gamma
        if self.zero_centered:
            torch.nn.init.zeros_(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] of the dtype of `x` [..., H]."""
        if not self.zero_centered:
            return super().forward(x)
        return rms_norm(x.float(), self.normalized_shape, 1.0 + self.weight.float(), self.eps).to(x.dtype)


class LatentRMSNorm(RMSNorm):
    """RMSNorm with a separate epsilon for the compressed query, key or value of latent attention."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, *, latent_eps: float) -> None:
        super().__init__(config, hidden_size, latent_eps)


class CutOverTensors(torch.nn.Module):
    """A module whose one parameter, named `cut`, is cut over tensor parallelism by its first dimension."""

    cut: str
    tp_group: ProcessGroup | None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The parameter for a distributed checkpoint."""
        assert metadata is not None
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {self.cut: 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


class JointRMSNorm(CutOverTensors):
    """RMSNorm over all `heads` of a query or key together, which tensor parallelism cuts by heads.

    The weight is this rank's part, [heads / tp * D].
    """

    cut = "weight"
    tp_group: ProcessGroup

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float,
        *,
        heads: int,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__()
        self.tp_group = pg_collection.tp
        self.width, self.eps = heads * hidden_size, eps
        self.weight = torch.nn.Parameter(torch.ones(self.width // self.tp_group.size(), dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., heads / tp, D] in the dtype of `x`, normed over all ranks' heads."""
        heads = x.flatten(-2).float()
        squares = heads.square().sum(-1, keepdim=True)
        if self.tp_group.size() > 1:
            # Every rank continues with the sum for its own heads, so its gradient is a sum over ranks too.
            squares = reduce_from_tensor_model_parallel_region(squares, group=self.tp_group)
            squares = copy_to_tensor_model_parallel_region(squares, group=self.tp_group)
        normed = heads * torch.rsqrt(squares / self.width + self.eps)
        return (self.weight * normed.to(x.dtype)).view_as(x)


class Xielu(MegatronModule):
    """xIELU (arXiv:2411.13010) with a layer's own numbers, [1] each; `beta` and `eps` do not train."""

    def __init__(self, config: TransformerConfig, *, tp_group: ProcessGroup) -> None:
        super().__init__(config=config)
        self.tp_group, dtype = tp_group, config.params_dtype
        self.alpha_p, self.alpha_n = (torch.nn.Parameter(torch.zeros(1, dtype=dtype)) for _ in range(2))
        self.beta, self.eps = (torch.nn.Parameter(torch.zeros(1, dtype=dtype), requires_grad=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., F / tp]; gradients of the numbers are sums over tensor parallelism."""
        alphas = copy_to_tensor_model_parallel_region(torch.cat([self.alpha_p, self.alpha_n]), group=self.tp_group)
        positive, negative = torch.nn.functional.softplus(alphas)
        curved = torch.where(
            x > 0, positive * x * x, (torch.expm1(torch.min(x, self.eps)) - x) * (self.beta + negative)
        )
        return curved + self.beta * x


BiasDropoutAdd = Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]
BuildBiasDropoutAdd = Callable[[bool, bool], BiasDropoutAdd]


class DecoderLayer(TransformerLayer):
    """Transformer layer with norms or a factor on outputs, or its own rotary embedding.

    `post_norms`: `post_self_attn_layernorm` and `post_mlp_layernorm` act before the residual is added.
    `residual_scale`: factor on outputs before the residual is added; not together with norms.
    `rope_theta`: base of this layer's rotary embedding, which is not scaled; None takes the model's.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        *args: Any,
        post_norms: bool,
        residual_scale: float,
        rope_theta: float | None,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, submodules, *args, **kwargs)  # arguments differ between Megatron-Core's releases
        if post_norms:
            self.post_self_attn_layernorm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
            self.post_mlp_layernorm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
            self.self_attn_bda: BuildBiasDropoutAdd = _changed(self.post_self_attn_layernorm)
            self.mlp_bda: BuildBiasDropoutAdd = _changed(self.post_mlp_layernorm)
        elif residual_scale != 1.0:
            self.self_attn_bda = self.mlp_bda = _changed(lambda output: output * residual_scale)
        self.rotary_pos_emb: PackedRotary | None = None
        if rope_theta is not None:
            # Attention multiplies angles by yarn's factor, which it finds in its config or, from 0.19 on, has kept.
            self.self_attention.config = copy.copy(config)
            vars(self.self_attention.config).pop("yarn_rotary_scaling_factor", None)
            self.self_attention._yarn_concentration_factor = 1.0
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


def _changed(change: Callable[[Tensor], Tensor]) -> BuildBiasDropoutAdd:
    """Return Megatron-Core's residual connection with a change of the output before the addition."""

    def build(training: bool, fused: bool) -> BiasDropoutAdd:
        add = get_bias_dropout_add(training, fused)

        def apply(output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
            output, bias = output_with_bias
            return add((change(output if bias is None else output + bias), None), residual, dropout)

        return apply

    return build


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
