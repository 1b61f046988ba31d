"""L2 norms of tensors of any length.

torch's float32 norm of a long tensor loses digits on a CPU: 2 % at 1.5e8 elements. Kernels of a GPU add in a tree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK = 4096  # elements whose squares are added in float32 on a CPU


def squared_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of the squares of all elements, a float64 scalar where the tensors are; the host does not wait.

    tensors: floating, of any shape, on one device, of one dtype; without any, zero on the host.
    """
    norms = [torch.zeros(1, dtype=torch.float64)]
    if tensors:
        dtype = torch.promote_types(tensors[0].dtype, torch.float32)
        if tensors[0].device.type == "cpu":
            norms += [_block_norms(tensor.detach().reshape(-1), dtype).double() for tensor in tensors]
        else:
            norms = [torch.stack(torch._foreach_norm(list(tensors), dtype=dtype)).double()]
    return torch.cat(norms).square().sum()


def norm(tensor: Tensor) -> float:
    """Return the L2 norm of one tensor of any shape; the host waits for it."""
    return math.sqrt(float(squared_norm([tensor])))


def distance(actual: Tensor, expected: Tensor, *, floor: float) -> float:
    """Return |actual - expected| / |expected| of two tensors; infinite for no number.

    floor: size of an element; a smaller `expected` counts as a tensor of this size.
    """
    gap = norm(actual.double() - expected.double())
    relative = gap / max(norm(expected.double()), floor * math.sqrt(expected.numel())) if gap else 0.0
    return relative if math.isfinite(relative) else math.inf


def _block_norms(flat: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the norm of each block of [N], and of the rest, [N // BLOCK + 1] of `dtype`."""
    end = len(flat) // BLOCK * BLOCK
    whole = torch.linalg.vector_norm(flat[:end].view(-1, BLOCK), dim=1, dtype=dtype)
    return torch.cat([whole, torch.linalg.vector_norm(flat[end:], dtype=dtype).view(1)])
