"""Causal grouped-query attention for a batch of equally long sequences: fused torch kernels, or written out.

Shapes: the queries are those of the last S of M tokens. query [B, heads, S, D], key [B, groups, M, D], value
[B, groups, M, E] -> [B, heads, S, E]; E may differ from D, and groups divides heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad, scaled_dot_product_attention

from mega_rl.parallel.accelerator.base import send


class Kernel(Protocol):
    """An attention kernel: softmax(query key^T scale) value under a causal mask."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None, sinks: Tensor | None
    ) -> Tensor:
        """Return the context [B, heads, S, E] in the dtype of value.

        scale: of the products of queries and keys. window: last tokens that each may see, itself included; None: all.
        sinks: [heads] logits that take part in the softmax and attend to nothing.
        """
        ...


def eager_attention(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None, sinks: Tensor | None
) -> Tensor:
    """Attention written out: products in the query's dtype; scale, mask and softmax at least in float32."""
    batch, heads, queries, _ = query.shape
    groups, keys = key.size(1), key.size(2)
    together = heads // groups * queries  # the queries of a group, as rows of one product: keys are not repeated
    products = query.reshape(batch, groups, together, -1) @ key.mT
    logits = products.view(batch, heads, queries, keys).to(torch.promote_types(query.dtype, torch.float32)) * scale
    logits = logits.masked_fill(~_seen(queries, keys, window, query.device), -torch.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks.to(logits.dtype)[:, None, None].expand(batch, -1, queries, 1)], dim=-1)
    weights = logits.softmax(dim=-1)[..., :keys].to(value.dtype)
    return (weights.reshape(batch, groups, together, keys) @ value).view(batch, heads, queries, -1)


def sdpa_attention(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None, sinks: Tensor | None
) -> Tensor:
    """Attention by torch's `scaled_dot_product_attention`: plain causality by its flag, windows and sinks by a mask."""
    grouped = query.size(1) != key.size(1)
    queries, keys = query.size(2), key.size(2)
    mask = _mask(queries, keys, window, sinks, query)
    causal = mask is None and queries == keys
    if mask is None and not causal:
        mask = causal_lower_right(queries, keys)  # kernels that know the pattern make no matrix of it
    if sinks is not None:
        # The sink is one more key: of zeros, so that its logit is the mask's entry, and with a value of zeros.
        key, value = (torch.cat([x, x.new_zeros(*x.shape[:2], 1, x.size(3))], dim=2) for x in (key, value))
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )


KERNELS: dict[str, Kernel] = {"eager": eager_attention, "sdpa": sdpa_attention}


def _mask(queries: int, keys: int, window: int | None, sinks: Tensor | None, like: Tensor) -> Tensor | None:
    """Return the mask of windows and sinks; None if attention is only causal.

    [S, M] bool of a window, [heads, S, M + 1] of the dtype of `like` with sinks.
    """
    if (window is None or window >= keys) and sinks is None:
        return None
    seen = _seen(queries, keys, window, like.device)
    if sinks is None:
        return seen
    bias = torch.zeros_like(seen, dtype=like.dtype).masked_fill(~seen, -torch.inf).expand(sinks.numel(), -1, -1)
    return torch.cat([bias, sinks.to(like.dtype)[:, None, None].expand(-1, queries, 1)], dim=2)


def _seen(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return [S, M] bool: the keys that each query attends to."""
    before = keys - queries
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(before)
    return seen if window is None or window >= keys else seen.triu(before + 1 - window)


LARGEST_HEAD = 256  # elements of a query head that the kernel takes, in multiples of 8
HEAD_MULTIPLE = 8


def fits_varlen(query: Tensor, value: Tensor, sinks: Tensor | None) -> bool:
    """Return whether the varlen kernel takes query [T, heads, D], value [T, groups, E] and `sinks`."""
    return (
        query.device.type == "cuda"
        and query.dtype in (torch.bfloat16, torch.float16)
        and sinks is None
        and value.size(-1) <= query.size(-1) <= LARGEST_HEAD
        and query.size(-1) % HEAD_MULTIPLE == 0
        and torch.backends.cuda.is_flash_attention_available()
    )


def attend_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: float,
    window: int | None,
) -> Tensor:
    """Return the context [T, heads, E] of packed query [T, heads, D].

    key: [T, groups, D]. value: [T, groups, E].

    cu_seqlens: [n+1] int32 on the device, where sequences begin, from 0 to T. max_seqlen: tokens of the longest.
    window: last tokens that each may see, itself included; None: all before it. The kernel knows one size of heads:
    narrower values are padded with zeros.
    """
    width, missing = value.size(-1), query.size(-1) - value.size(-1)
    context = varlen_attn(
        query,
        key,
        pad(value, (0, missing)) if missing else value,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.size(1) != key.size(1),
    )
    assert isinstance(context, Tensor), "the logarithms of sums were not asked for"
    return context[..., :width]


SMALLEST_CLASS = 16  # tokens; shorter sequences share one length class

# (query [n, heads, c, D], key [n, groups, m, D], value [n, groups, m, E]) -> [n, heads, c, E], causal: the queries are
# the last c of m tokens.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class LengthClasses:
    """Index maps between the packed order and padded classes of similar length.

    Classes are powers of two, so less than half of a class is padding, and every layer and pass of a micro-batch reuses
    these maps.
    """

    shapes: tuple[tuple[int, int], ...]  # (sequences, slots of each) of every class
    index: Tensor  # [slots] int64, packed position of each padded slot; past a sequence's end its last token's
    slots: Tensor  # [T] int64, where each packed position lies among the slots of all classes
    filled: Tensor  # [slots] bool, slots that hold a token rather than padding

    @staticmethod
    def of(cu_seqlens: Tensor, device: torch.device) -> LengthClasses:
        """Return the maps on `device`; `cu_seqlens` is [n+1] int32 on the host, from 0 to T."""
        bounds = cu_seqlens.to(torch.int64)
        starts, lengths = bounds[:-1], bounds.diff()
        rounded = torch.clamp(2 ** torch.ceil(torch.log2(lengths.clamp(min=1).double())).long(), min=SMALLEST_CLASS)
        shapes, index, filled = [], [], []
        slots, offset = torch.empty(int(bounds[-1]), dtype=torch.int64), 0
        for size in rounded.unique().tolist():
            members = (rounded == size).nonzero().flatten()
            ramp = torch.arange(int(lengths[members].max()))
            inside = ramp < lengths[members, None]  # [n, m]
            position = starts[members, None] + torch.minimum(ramp, (lengths[members, None] - 1).clamp(min=0))
            slot = offset + torch.arange(inside.numel()).view_as(inside)
            slots[position[inside]] = slot[inside]
            shapes.append((inside.size(0), inside.size(1)))
            index.append(position.flatten())
            filled.append(inside.flatten())
            offset += inside.numel()
        maps = [send(each, device) for each in (torch.cat(index), slots, torch.cat(filled))]
        return LengthClasses(tuple(shapes), *maps)


def attend_by_length(attend: Attend, query: Tensor, key: Tensor, value: Tensor, classes: LengthClasses) -> Tensor:
    """Return the context [T, heads, E] of packed query [T, heads, D].

    key: [T, groups, D]. value: [T, groups, E].

    Tokens attend within their own sequence: `attend` is given one length class after the other, each a batch. The
    gradient of a padding slot is exactly zero, as no real query sees a later slot and the padding queries' outputs are
    dropped: the backward reads only the real slots.
    """
    padded = [Picked.apply(x, classes.index, classes.slots) for x in (query, key, value)]
    contexts, offset = [], 0
    for count, length in classes.shapes:
        end = offset + count * length
        q, k, v = (x[offset:end].unflatten(0, (count, length)).transpose(1, 2) for x in padded)
        contexts.append(attend(q, k, v).transpose(1, 2).flatten(0, 1))
        offset = end
    context = contexts[0] if len(contexts) == 1 else torch.cat(contexts)
    return _ToPacked.apply(context, classes.index, classes.slots, classes.filled)


class Picked(torch.autograd.Function):
    """Rows of a tensor by `index`; in the backward `back` picks from the result's gradients."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, tensor: Tensor, index: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return tensor.index_select(0, index)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return grad.index_select(0, back), None, None


class _ToPacked(torch.autograd.Function):
    """[slots, ...] padded -> [T, ...] packed: the inverse of `Picked` on the real slots."""

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
