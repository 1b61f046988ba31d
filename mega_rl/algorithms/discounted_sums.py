"""Discounted sums over the tokens of rows, in ceil(log2 S) vector steps in place of a loop over S tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def discounted_sums(x: Tensor, decay: float | Tensor) -> Tensor:
    """Return y_t = x_t + decay * y_{t+1} of each row, 0 behind its end: [B, S] as x.

    decay of all rows, or [B, 1] float64. After step k of the doubling scan each token holds the sum of its next 2^k.
    Padding a row further adds exact zeros, so the result does not depend on S.
    """
    span, length = 1, x.shape[1]
    while span < length:
        later = torch.zeros_like(x)
        later[:, :-span] = x[:, span:]
        x = x + torch.as_tensor(decay**span, dtype=x.dtype) * later
        span *= 2
    return x
