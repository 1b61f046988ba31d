"""Attention of packed sequences by torch's kernel for variable lengths, FlashAttention on CUDA devices."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad

LARGEST_HEAD = 256  # elements of a query head that the kernel takes, in multiples of 8
HEAD_MULTIPLE = 8


def fits(query: Tensor, value: Tensor, sinks: Tensor | None) -> bool:
    """Return whether the kernel can attend with query [T, heads, D] to value [T, groups, E] and these sinks."""
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
    """[T, heads, E]: context of packed query [T, heads, D] in keys [T, groups, D] and values [T, groups, E].

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
