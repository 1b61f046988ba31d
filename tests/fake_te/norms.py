"""RMSNorm of rows, forward and backward, in FP32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.fake_te.enums import TORCH


def rmsnorm_fwd(
    input: Tensor,
    weight: Tensor,
    eps: float,
    ln_out: Tensor | None,
    quantizer: Any,
    otype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Tensor, None, Tensor]:
    """Return (y [n, H], None, 1 / rms [n] float32) of x [n, H]."""
    assert quantizer is None
    assert input.dim() == 2
    x = input.float()
    rsigma = torch.rsqrt(x.square().mean(-1) + eps)
    out = (x * rsigma[:, None] * _gamma(weight, zero_centered_gamma)).to(TORCH[otype])
    return out if ln_out is None else ln_out.copy_(out), None, rsigma


def rmsnorm_bwd(
    dz: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor, sm_margin: int, zero_centered_gamma: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x [n, H] and of the weight [H]."""
    normed, grad = x.float() * rsigma[:, None], dz.float()
    scaled = grad * _gamma(gamma, zero_centered_gamma)
    dx = rsigma[:, None] * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    return dx.to(x.dtype), (grad * normed).sum(0).to(gamma.dtype)


def _gamma(weight: Tensor, zero_centered: bool) -> Tensor:
    return weight.float() + 1 if zero_centered else weight.float()
