"""Sums over the ranks that share each sequence, for losses that read whole sequences."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def sum_over_context(x: Tensor, *, group: ProcessGroup) -> Tensor:
    """Return the sum of `x` over the context-parallel group, the same on all of its ranks; differentiable, collective.

        y = sum over ranks r of x_r            d loss / d x_r = sum over ranks q of d loss_q / d y

    Every rank's share of the loss reads the sum, and the loss is the sum of the shares, so the gradient travels, too:
    an all-reduce in the backward as in the forward. `x` has one shape on all ranks; so has the graph of the loss, for
    ranks must come to their collectives in one order. In a group of one rank `x` itself.
    """
    return x if group.size() == 1 else _SumOverGroup.apply(x, group)


class _HasGroup(Protocol):
    """The context of an autograd function that keeps its group."""

    group: ProcessGroup


class _SumOverGroup(torch.autograd.Function):
    """The sum of all ranks' tensors, whose adjoint is itself."""

    @staticmethod
    def forward(ctx: _HasGroup, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        total = x.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: _HasGroup, grad: Tensor) -> tuple[Tensor, None]:
        return _SumOverGroup.apply(grad, ctx.group), None
