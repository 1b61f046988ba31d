"""Causal core attention on torch SDPA, for padded and packed batches."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import MegatronModule, TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

SMALLEST_CLASS = 16  # tokens; shorter sequences share one length class


@dataclass
class PackedSequences(PackedSeqParams):
    """`PackedSeqParams` plus the index maps between the packed order and padded length classes.

    SDPA has no variable-length kernel on every device, so sequences of similar length are attended together as one
    padded batch. Classes are powers of two, so less than half of a class is padding, and every layer and pass of a
    micro-batch reuses these maps.

    `classes[i]` is [n_i, m_i] int64: packed position of each padded slot (slots past a sequence's end repeat its last
    token). `slots` is [T] int64: where each packed position lies in the concatenation of the flattened classes.
    `filled` is [sum n_i*m_i] bool: slots that hold a token rather than padding.
    """

    classes: list[Tensor] = field(default_factory=list)
    slots: Tensor | None = None
    filled: Tensor | None = None


def packed_sequences(cu_seqlens: Tensor, max_seqlen: int) -> PackedSequences:
    """Attention parameters of a packed micro-batch whose sequences end at `cu_seqlens` ([n+1] int32, from 0 to T)."""
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


class SDPACoreAttention(MegatronModule):
    """Causal grouped-query attention of one tensor-parallel rank's heads; no dropout, no bias, no context parallelism.

    Takes the place of Transformer Engine's `DotProductAttention` in Megatron-Core's `SelfAttention`; upstream's local
    `DotProductAttention` knows no packed input and materialises the [S, S] scores.
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
    ) -> None:
        super().__init__(config=config)
        assert config.context_parallel_size == 1, "SDPACoreAttention has no context parallelism"
        assert attn_mask_type == AttnMaskType.causal
        assert attention_type == "self"
        assert config.window_size is None
        assert config.softmax_type == "vanilla"
        self.softmax_scale = 1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale

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
        """Context of each token, heads flattened.

        Padded: query [S, B, heads, D], key and value [S, B, groups, D] -> [S, B, heads*D]; rows are right-padded, so
        the causal mask alone keeps padding out of every real token's context.
        Packed: query [T, heads, D], key and value [T, groups, D] -> [T, heads*D], `packed_seq_params` a
        `PackedSequences`; tokens attend within their own sequence.
        """
        assert attention_bias is None
        if packed_seq_params is None:
            q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            return self._attend(q, k, v).permute(2, 0, 1, 3).flatten(2)
        assert isinstance(packed_seq_params, PackedSequences)
        assert packed_seq_params.slots is not None
        assert packed_seq_params.filled is not None
        classes = packed_seq_params.classes
        index = classes[0].flatten() if len(classes) == 1 else torch.cat([c.flatten() for c in classes])
        padded = [_ToClasses.apply(x, index, packed_seq_params.slots) for x in (query, key, value)]
        contexts, offset = [], 0
        for shape in (c.shape for c in classes):
            q, k, v = (x[offset : offset + shape.numel()].unflatten(0, shape).transpose(1, 2) for x in padded)
            contexts.append(self._attend(q, k, v).transpose(1, 2).flatten(2).flatten(0, 1))
            offset += shape.numel()
        context = contexts[0] if len(contexts) == 1 else torch.cat(contexts)
        return _ToPacked.apply(context, index, packed_seq_params.slots, packed_seq_params.filled)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[B, heads, S, D] of causal attention; key and value have [B, groups, S, D]."""
        grouped = query.size(1) != key.size(1)
        return scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.softmax_scale, enable_gqa=grouped
        )
