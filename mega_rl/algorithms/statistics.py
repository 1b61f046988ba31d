"""Mean, variance and whitening over the tokens of a batch that is spread over ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

SumOverRanks = Callable[[Tensor], Tensor]


def identity(tensor: Tensor) -> Tensor:
    """Return the tensor itself, the sum over a group of one rank."""
    return tensor


@dataclass(frozen=True)
class Moments:
    """Count, mean and population variance of the masked elements of every rank; scalar float64 tensors."""

    count: Tensor
    mean: Tensor
    variance: Tensor


def global_moments(x: Tensor, mask: Tensor, *, sum_over_ranks: SumOverRanks = identity) -> Moments:
    """Return the moments of `x[mask]` over all ranks.

    x: any shape, floating; mask: same shape, bool. Two passes (the mean first, then squared distances to it) with
    float64 sums, because E[x^2] - E[x]^2 loses every digit when the mean is large against the spread. `sum_over_ranks`
    is called exactly twice, also by a rank without tokens, with float64 tensors of shape [2] and [1]. An empty global
    batch has count, mean and variance 0.
    """
    masked = torch.where(mask, x.double(), 0.0)
    count, total = sum_over_ranks(torch.stack([mask.sum().double(), masked.sum()])).unbind()
    safe_count = count.clamp(min=1.0)
    mean = total / safe_count
    squares = torch.where(mask, (masked - mean).square(), 0.0).sum()
    variance = sum_over_ranks(squares.reshape(1))[0] / safe_count
    return Moments(count=count, mean=mean, variance=variance)


def whiten(x: Tensor, mask: Tensor, *, sum_over_ranks: SumOverRanks = identity, eps: float = 1e-8) -> Tensor:
    """Return `x` with mean 0 and variance 1 over the global batch; 0 off the mask.

        y = (x - mean) / sqrt(variance + eps)

    x [B, S] float32, mask [B, S] bool -> [B, S] float32. The variance is the population's (divided by the count): the
    tokens at hand are the whole batch, not a sample of one, and a batch of one token gives 0 instead of 0/0. N ranks
    give what one rank holding all rows gives, up to the order of float64 sums.
    Source: per-batch advantage normalisation of PPO implementations (Andrychowicz et al. 2021, arXiv:2006.05990, C67).
    """
    moments = global_moments(x, mask, sum_over_ranks=sum_over_ranks)
    y = (x.double() - moments.mean) * torch.rsqrt(moments.variance + eps)
    return torch.where(mask, y, 0.0).to(torch.float32)
