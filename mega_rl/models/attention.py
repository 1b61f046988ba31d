"""Causal core attention of Megatron-Core's layers and of others, for padded and packed batches."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import MegatronModule, TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.distributed import ProcessGroup

from mega_rl.models.attention_kernels import KERNELS
from mega_rl.models.context_parallel import Attend, SharedSequences, attend_shared, shared_sequences

SMALLEST_CLASS = 16  # tokens; shorter sequences share one length class


@dataclass
class PackedSequences(PackedSeqParams):
    """`PackedSeqParams` plus the index maps between the packed order and padded length classes.

    torch's kernels of every device know no variable lengths, so sequences of similar length are attended together as
    one padded batch. Classes are powers of two, so less than half of a class is padding, and every layer and pass of a
    micro-batch reuses these maps.

    `classes[i]` is [n_i, m_i] int64: packed position of each padded slot (slots past a sequence's end repeat its last
    token). `slots` is [T] int64: where each packed position lies in the concatenation of the flattened classes.
    `filled` is [sum n_i*m_i] bool: slots that hold a token rather than padding.
    """

    classes: list[Tensor] = field(default_factory=list)
    slots: Tensor | None = None
    filled: Tensor | None = None


def packed_sequences(
    cu_seqlens: Tensor, max_seqlen: int, *, cp_rank: int = 0, cp_size: int = 1
) -> PackedSequences | SharedSequences:
    """Attention parameters of a packed micro-batch whose sequences end at `cu_seqlens` ([n+1] int32, from 0 to T).

    With context parallelism `cu_seqlens` speaks of whole sequences, of which rank `cp_rank` holds its two chunks.
    """
    if cp_size > 1:
        return shared_sequences(cu_seqlens, max_seqlen, cp_rank=cp_rank, cp_size=cp_size)
    device = cu_seqlens.device
    bounds = cu_seqlens.to("cpu", torch.int64)
    starts, lengths = bounds[:-1], bounds.diff()
    rounded = torch.clamp(2 ** torch.ceil(torch.log2(lengths.clamp(min=1).double())).long(), min=SMALLEST_CLASS)
    classes, slots, filled = [], torch.empty(int(bounds[-1]), dtype=torch.int64), []
    offset = 0
    for size in rounded.unique().tolist():
        members = (rounded == size).nonzero().flatten()
        longest = int(lengths[members].max())
        ramp = torch.arange(longest)
        inside = ramp < lengths[members, None]  # [n, m]
        position = starts[members, None] + torch.minimum(ramp, (lengths[members, None] - 1).clamp(min=0))
        slot = offset + torch.arange(inside.numel()).view_as(inside)
        slots[position[inside]] = slot[inside]
        classes.append(position.to(device))
        filled.append(inside.flatten())
        offset += inside.numel()
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max_seqlen,
        max_seqlen_kv=max_seqlen,
        classes=classes,
        slots=slots.to(device),
        filled=torch.cat(filled).to(device),
    )


class _ToClasses(torch.autograd.Function):
    """[T, ...] packed -> [slots, ...] padded; both directions are gathers.

    The gradient of a padding slot is exactly zero: no real query sees a later slot, and the padding queries' outputs
    are dropped. So the backward needs to read the real slots only.
    """

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, packed: Tensor, index: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        return packed.index_select(0, index)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        (slots,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return grad.index_select(0, slots), None, None


class _ToPacked(torch.autograd.Function):
    """[slots, ...] padded -> [T, ...] packed; the inverse of `_ToClasses` on the real slots."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, padded: Tensor, index: Tensor, slots: Tensor, filled: Tensor
    ) -> Tensor:
        ctx.save_for_backward(index, filled)
        return padded.index_select(0, slots)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        index, filled = ctx.saved_tensors  # type: ignore[attr-defined]
        shape = [filled.numel()] + [1] * (grad.dim() - 1)
        return grad.index_select(0, index) * filled.view(shape), None, None, None


def attend_packed(attend: Attend, query: Tensor, key: Tensor, value: Tensor, sequences: PackedSequences) -> Tensor:
    """[T, heads, E]: context of packed query [T, heads, D] in keys [T, groups, D] and values [T, groups, E].

    Tokens attend within their own sequence: `attend` is given one length class after the other, each a batch.
    """
    assert sequences.slots is not None
    assert sequences.filled is not None
    classes = sequences.classes
    index = classes[0].flatten() if len(classes) == 1 else torch.cat([c.flatten() for c in classes])
    padded = [_ToClasses.apply(x, index, sequences.slots) for x in (query, key, value)]
    contexts, offset = [], 0
    for shape in (c.shape for c in classes):
        q, k, v = (x[offset : offset + shape.numel()].unflatten(0, shape).transpose(1, 2) for x in padded)
        contexts.append(attend(q, k, v).transpose(1, 2).flatten(0, 1))
        offset += shape.numel()
    context = contexts[0] if len(contexts) == 1 else torch.cat(contexts)
    return _ToPacked.apply(context, index, sequences.slots, sequences.filled)


class CoreAttention(MegatronModule):
    """Causal grouped-query attention of one tensor-parallel rank's heads; no dropout, no bias.

    Takes the place of Transformer Engine's `DotProductAttention` in Megatron-Core's `SelfAttention` and
    `MLASelfAttention`; upstream's local `DotProductAttention` knows no packed input, no value heads of another size
    than the query's, and materialises the [S, S] scores of every layer.

    `config.core_attention` is "eager" or "sdpa" (see `mega_rl.models.attention_kernels`).

    `config.window_size` = (w - 1, 0) gives the layers that `config.window_attn_skip_freq` names a sliding window of w
    tokens. `config.softmax_type` "learnable" gives every head a sink: `softmax_offset` [heads of this rank] are logits
    that take part in the softmax and attend to nothing.

    With `config.context_parallel_size` above 1 the tensors are this rank's slices of sequences that `pg_collection.cp`
    shares (see `mega_rl.models.context_parallel`).
    """

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
        right-padded, so the causal mask alone keeps padding out of every real token's context.
        Packed: query [T, heads, D], key [T, groups, D], value [T, groups, E] -> [T, heads*E], `packed_seq_params` a
        `PackedSequences`; tokens attend within their own sequence.
        """
        assert attention_bias is None
        if self.cp_group is not None:
            assert packed_seq_params is None or isinstance(packed_seq_params, SharedSequences)
            return attend_shared(
                self._attend,
                query,
                key,
                value,
                group=self.cp_group,
                window=self.window,
                sequences=packed_seq_params,
            )
        if packed_seq_params is None:
            q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            return self._attend(q, k, v).permute(2, 0, 1, 3).flatten(2)
        assert isinstance(packed_seq_params, PackedSequences)
        return attend_packed(self._attend, query, key, value, packed_seq_params).flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The kernel with what is this layer's; shapes as in `mega_rl.models.attention_kernels`."""
        return self.kernel(query, key, value, scale=self.softmax_scale, window=self.window, sinks=self.softmax_offset)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The sinks for a distributed checkpoint, cut over tensor parallelism."""
        assert metadata is not None
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
