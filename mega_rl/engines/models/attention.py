"""Causal core attention of Megatron-Core's layers and of others, for padded and packed batches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import MegatronModule, TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor
from torch.distributed import ProcessGroup

from mega_rl.data.packing import held_positions
from mega_rl.engines.models.attention_kernels import (
    KERNELS,
    Kernel,
    LengthClasses,
    attend_by_length,
    attend_varlen,
    fits_varlen,
    sdpa_attention,
)
from mega_rl.engines.models.context_parallel import SharedSequences, attend_shared, shared_sequences
from mega_rl.engines.models.layer import CutOverTensors
from mega_rl.engines.models.rope import ONE_ROW, TokenPositions
from mega_rl.parallel.accelerator.base import send

HOST = torch.device("cpu")


@dataclass
class PackedSequences(TokenPositions):
    """Attention parameters of a packed micro-batch that one rank holds whole; `cu_seqlens_*` are on the host.

    Every layer and pass of a micro-batch uses the same ones.
    """

    device: torch.device = HOST
    _bounds: Tensor | None = None
    _classes: LengthClasses | None = None

    @property
    def bounds(self) -> Tensor:
        """`cu_seqlens` on the device."""
        if self._bounds is None:
            self._bounds = send(self.cu_seqlens_q, self.device)
        return self._bounds

    @property
    def by_sequence(self) -> PackedSeqParams:
        """The same for upstream's layers that keep sequences apart themselves."""
        longest = {"max_seqlen_q": self.max_seqlen_q, "max_seqlen_kv": self.max_seqlen_kv}
        return PackedSeqParams(qkv_format="thd", cu_seqlens_q=self.bounds, cu_seqlens_kv=self.bounds, **longest)

    @property
    def classes(self) -> LengthClasses:
        """Index maps of the sequences, padded in classes of similar length."""
        if self._classes is None:
            self._classes = LengthClasses.of(self.cu_seqlens_q, self.device)
        return self._classes


def packed_sequences(
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    positions: Tensor | None = None,
    device: torch.device = HOST,
    cp_rank: int = 0,
    cp_size: int = 1,
) -> PackedSequences | SharedSequences:
    """Attention parameters of a packed micro-batch whose sequences end at `cu_seqlens` ([n+1] int32 on the host).

    `positions` [T / cp] int64, on `device`, turn queries and keys; None where nothing asks for rotary angles. With
    context parallelism `cu_seqlens` speaks of whole sequences, of which rank `cp_rank` holds its two chunks.
    """
    if cp_size > 1:
        return shared_sequences(
            cu_seqlens, max_seqlen, positions=positions, device=device, cp_rank=cp_rank, cp_size=cp_size
        )
    return PackedSequences.of(cu_seqlens, max_seqlen, qkv_format=ONE_ROW, positions=positions, device=device)


def te_sequences(cu_seqlens: Tensor, max_seqlen: int, *, positions: Tensor, cp_size: int = 1) -> TokenPositions:
    """Attention parameters as Transformer Engine's layers take them, on the device of `positions`.

    Of context-parallel slices every boundary is that of the whole sequences, padding included.
    """
    bounds = send(cu_seqlens, positions.device)
    padded = {"cu_seqlens_q_padded": bounds, "cu_seqlens_kv_padded": bounds} if cp_size > 1 else {}
    return TokenPositions.of(bounds, max_seqlen, qkv_format="thd", positions=positions, **padded)


def attend_packed(
    kernel: Kernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: PackedSequences,
    *,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return the context [T, heads, E] of packed query [T, heads, D].

    key: [T, groups, D]. value: [T, groups, E].

    Tokens attend within their own sequence: by torch's kernel for variable lengths where "sdpa" is asked for and that
    kernel can run (`fits_varlen`), else by `kernel` in classes of similar length. Arguments as in `Kernel`.
    """
    if kernel is sdpa_attention and fits_varlen(query, value, sinks):
        return attend_varlen(
            query,
            key,
            value,
            cu_seqlens=sequences.bounds,
            max_seqlen=sequences.max_seqlen_q,
            scale=scale,
            window=window,
        )
    attend = partial(kernel, scale=scale, window=window, sinks=sinks)
    return attend_by_length(attend, query, key, value, sequences.classes)


class CoreAttention(CutOverTensors, MegatronModule):
    """Causal grouped-query attention of one tensor-parallel rank's heads; no dropout, no bias.

    Takes the place of Transformer Engine's `DotProductAttention` in Megatron-Core's `SelfAttention` and
    `MLASelfAttention`; upstream's local `DotProductAttention` knows no packed input, no value heads of another size
    than the query's, and materialises the [S, S] scores of every layer.

    `config.core_attention` is "eager" or "sdpa" (see `mega_rl.engines.models.attention_kernels`).

    `config.window_size` = (w - 1, 0) gives the layers that `config.window_attn_skip_freq` names a sliding window of w
    tokens. `config.softmax_type` "learnable" gives every head a sink: `softmax_offset` [heads of this rank] are logits
    that take part in the softmax and attend to nothing.

    With `config.context_parallel_size` above 1 the tensors are this rank's slices of sequences that `pg_collection.cp`
    shares (see `mega_rl.engines.models.context_parallel`).
    """

    cut = "softmax_offset"

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
    ) -> None:
        super().__init__(config=config)
        assert attn_mask_type == AttnMaskType.causal
        assert attention_type == "self"
        self.kernel = KERNELS[config.core_attention]
        self.softmax_scale = 1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale
        self.window: int | None = None
        if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
            before, after = config.window_size
            assert after == 0, "a causal window ends at the token"
            self.window = before + 1
        self.tp_group = None if pg_collection is None else pg_collection.tp
        self.cp_group: ProcessGroup | None = None
        if config.context_parallel_size > 1:
            assert pg_collection is not None
            self.cp_group = pg_collection.cp
        self.query_growth: tuple[float, int] | None = getattr(config, "query_growth", None)
        self.softmax_offset: torch.nn.Parameter | None = None
        if config.softmax_type != "vanilla":
            assert config.softmax_type == "learnable"
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(self.softmax_offset, is_parallel=True, dim=0, stride=1)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Context of each token, heads flattened; E is the size of a value head.

        Padded: query [S, B, heads, D], key [S, B, groups, D], value [S, B, groups, E] -> [S, B, heads*E]; rows are
        right-padded, so the causal mask keeps padding out of every real token's context.
        Packed: query [T, heads, D], key [T, groups, D], value [T, groups, E], or with a dimension of 1 behind T ->
        [T, 1, heads*E]; tokens attend within their own sequence.
        """
        assert attention_bias is None
        sequences = packed_seq_params
        assert sequences is None or isinstance(sequences, TokenPositions)
        if sequences is not None:
            query, key, value = (x.squeeze(1) if x.dim() == 4 else x for x in (query, key, value))
        query = self._grown(query, None if sequences is None else sequences.positions)
        if self.cp_group is not None:
            assert sequences is None or isinstance(sequences, SharedSequences)
            context = attend_shared(
                self._attend, query, key, value, group=self.cp_group, window=self.window, sequences=sequences
            )
        elif sequences is None:
            q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            context = self._attend(q, k, v).permute(2, 0, 1, 3).flatten(2)
        else:
            assert isinstance(sequences, PackedSequences)
            attend = partial(attend_packed, scale=self.softmax_scale, window=self.window, sinks=self.softmax_offset)
            context = attend(self.kernel, query, key, value, sequences).flatten(1)
        return context if sequences is None else context.unsqueeze(1)

    def _grown(self, query: Tensor, positions: Tensor | None) -> Tensor:
        """Return `query` [T, ...] grown with its position (see `Yarn`); None: of padded rows."""
        if self.query_growth is None:
            return query
        factor, length = self.query_growth
        if positions is None:
            at = (0, 1) if self.cp_group is None else (self.cp_group.rank(), self.cp_group.size())
            positions = held_positions([query.size(0) * at[1]], cp_rank=at[0], cp_size=at[1]).to(query.device)
        growth = 1 + factor * torch.log(1 + torch.floor(positions / length))
        return query * growth.to(query.dtype).view(-1, *[1] * (query.dim() - 1))

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The kernel with what is this layer's; shapes as in `mega_rl.engines.models.attention_kernels`."""
        return self.kernel(query, key, value, scale=self.softmax_scale, window=self.window, sinks=self.softmax_offset)
