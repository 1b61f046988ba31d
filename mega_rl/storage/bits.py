"""Tensors as plain memory: equality of bits, where nan equals itself and -0 is not 0."""

from __future__ import annotations

import torch
from torch import Tensor


def bits(tensor: Tensor) -> Tensor:
    """Return the memory of a tensor, [elements * size] uint8; copied only if the tensor is not contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same dtype, shape and bits."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    x, y = bits(a), bits(b)
    if x.storage_offset() % 8 or y.storage_offset() % 8:
        return torch.equal(x, y)
    # Eight bytes at a time is several times faster.
    words = x.numel() // 8 * 8
    return torch.equal(x[:words].view(torch.int64), y[:words].view(torch.int64)) and torch.equal(x[words:], y[words:])
