"""Linear map of a bfloat16 hidden state and weight whose result is float32: the logits of `model.fp32_head`.

The product of two bfloat16 numbers is exact in float32, so bfloat16 operands lose nothing where the sums, and the
result, are float32; what a bfloat16 head loses, it loses when it rounds the logits to 8 bits. The backward has a
float32 gradient, which a GPU would multiply at a fraction of its speed. There the gradient is the sum of two bfloat16
parts, g = round(g) + round(g - round(g)) + error with |error| <= 2^-17 |g|, and two products of bfloat16 take the place
of one of float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Collective = Callable[[Tensor], Tensor]


def fp32_linear(
    hidden: Tensor, weight: Tensor, *, gather: Collective | None = None, reduce: Collective | None = None
) -> Tensor:
    """Return hidden @ weight.T as float32 [S, B, V] of hidden [S, B, H] and weight [V, H], both bfloat16.

    Gradients are computed in float32 and rounded once, to the dtypes of `hidden` and `weight`. Only the two inputs are
    kept for the backward.

    gather: applied to `hidden` before the product, in both passes: the tokens of other ranks. None: none.
    reduce: applied to the float32 gradient of what `gather` gave: the sum over ranks that hold other columns, this
        rank's tokens of it where `gather` added some. None: the weight is whole.
    """
    return _Fp32Linear.apply(hidden, weight, gather, reduce)


class _Fp32Linear(torch.autograd.Function):
    """The map and its gradients; see `fp32_linear`."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, gather: Collective | None, reduce: Collective | None
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.gather, ctx.reduce = gather, reduce
        whole = hidden if gather is None else gather(hidden)
        return product(whole.flatten(0, -2), weight.t()).view(*whole.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden, weight = ctx.saved_tensors
        of_hidden: Tensor | None = None
        of_weight: Tensor | None = None
        whole = hidden if ctx.gather is None or not ctx.needs_input_grad[1] else ctx.gather(hidden)
        rows = whole.flatten(0, -2)
        for part in parts(grad.flatten(0, -2), split=grad.is_cuda):
            if ctx.needs_input_grad[0]:
                of_hidden = _plus(of_hidden, product(part, weight))
            if ctx.needs_input_grad[1]:
                of_weight = _plus(of_weight, product(part.t(), rows))
        if of_hidden is not None:
            of_hidden = of_hidden.view(*grad.shape[:-1], weight.shape[1])
            of_hidden = (of_hidden if ctx.reduce is None else ctx.reduce(of_hidden)).to(hidden.dtype)
        return of_hidden, None if of_weight is None else of_weight.to(weight.dtype), None, None


def parts(grad: Tensor, *, split: bool) -> Iterator[Tensor]:
    """Yield tensors of bfloat16 whose sum is the float32 `grad` to 2^-17 of each element, or `grad` itself.

    Both parts use the same memory: the second takes the place of the first.
    """
    if not split:
        yield grad
        return
    part = grad.bfloat16()
    yield part
    yield torch.sub(grad, part, out=part)


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right in float32, of matrices [M, K] and [K, N] of bfloat16 or float32."""
    if left.is_cuda and left.dtype == right.dtype == torch.bfloat16:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _plus(total: Tensor | None, term: Tensor) -> Tensor:
    """Return the sum of both, in the memory of `total` where there is one."""
    return term if total is None else total.add_(term)
