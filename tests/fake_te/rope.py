"""Fused rotary embedding: positions are counted anew in each packed sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.fake_te.enums import NVTE_QKV_Format as Format


def fused_rope_forward(
    input: Tensor,
    freqs: Tensor,
    start_positions: Tensor | None,
    qkv_format: Any,
    interleaved: bool,
    cu_seqlens: Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> Tensor:
    """Return `input` [T, heads, D] ("thd") or [S, B, heads, D] ("sbhd") turned by `freqs` [positions, 1, 1, d <= D]."""
    cos, sin = _tables(input, freqs, start_positions, qkv_format, cu_seqlens, cp_size, cp_rank)
    turned, rest = input.float().split([freqs.size(-1), input.size(-1) - freqs.size(-1)], dim=-1)
    return torch.cat([turned * cos + _half(turned, interleaved) * sin, rest], dim=-1).to(input.dtype)


def fused_rope_backward(
    output_grads: Tensor,
    freqs: Tensor,
    start_positions: Tensor | None,
    qkv_format: Any,
    interleaved: bool,
    cu_seqlens: Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> Tensor:
    """Return the gradient of the input: turned back, by the transposed rotation."""
    cos, sin = _tables(output_grads, freqs, start_positions, qkv_format, cu_seqlens, cp_size, cp_rank)
    turned, rest = output_grads.float().split([freqs.size(-1), output_grads.size(-1) - freqs.size(-1)], dim=-1)
    return torch.cat([turned * cos - _half(turned * sin, interleaved), rest], dim=-1).to(output_grads.dtype)


def _tables(
    tensor: Tensor,
    freqs: Tensor,
    start: Tensor | None,
    qkv_format: Any,
    cu_seqlens: Tensor | None,
    size: int,
    rank: int,
) -> tuple[Tensor, Tensor]:
    """Return (cosines, sines) that broadcast over the first positions' dimension of `tensor`."""
    assert start is None, "rotary embedding with start positions is one of inference"
    assert freqs.dtype == torch.float32
    if qkv_format == Format.NVTE_SBHD:  # type: ignore[attr-defined]
        angles = freqs[_held(tensor.size(0), size, rank)]
    else:
        assert qkv_format == Format.NVTE_THD, qkv_format  # type: ignore[attr-defined]
        assert cu_seqlens is not None
        lengths = (cu_seqlens.diff() // size).tolist()
        angles = torch.cat([freqs[_held(length, size, rank)] for length in lengths]).squeeze(1)
        assert len(angles) == len(tensor), f"{len(tensor)} tokens, cu_seqlens end at {len(angles)}"
    return angles.cos(), angles.sin()


def _held(length: int, size: int, rank: int) -> Tensor:
    """Positions of the two chunks that a context-parallel rank has of a sequence of `length` * `size`."""
    if size == 1:
        return torch.arange(length)
    chunks = torch.arange(length * size).chunk(2 * size)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])


def _half(x: Tensor, interleaved: bool) -> Tensor:
    if interleaved:
        return torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)
