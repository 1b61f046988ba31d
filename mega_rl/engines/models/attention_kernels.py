"""Causal grouped-query attention of a batch of sequences of one length: by torch's fused kernels, or written out.

Shapes: the queries are those of the last S of M tokens. query [B, heads, S, D], key [B, groups, M, D], value
[B, groups, M, E] -> [B, heads, S, E]; E may differ from D, and groups divides heads.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention


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
    """Attention written out: matrix products in the dtype of query; scale, mask and softmax at least in float32."""
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
    """Return the mask of windows and sinks; None where causality alone applies.

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
