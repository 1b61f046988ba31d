"""Attention of packed sequences by kernels for batches of one length: sequences of similar length, padded, together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mega_rl.parallel.accelerator.transfer import send

SMALLEST_CLASS = 16  # tokens; shorter sequences share one length class

# (query [n, heads, m, D], key [n, groups, m, D], value [n, groups, m, E]) -> [n, heads, m, E], causal
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class LengthClasses:
    """Index maps between the packed order and padded classes of similar length.

    Classes are powers of two, so less than half of a class is padding, and every layer and pass of a micro-batch reuses
    these maps.
    """

    shapes: tuple[tuple[int, int], ...]  # (sequences, slots of each) of every class
    index: Tensor  # [slots] int64, packed position of each padded slot; past a sequence's end its last token's
    slots: Tensor  # [T] int64, where each packed position lies among the slots of all classes
    filled: Tensor  # [slots] bool, slots that hold a token rather than padding

    @staticmethod
    def of(cu_seqlens: Tensor, device: torch.device) -> LengthClasses:
        """Return the maps on `device` of sequences that end at `cu_seqlens` ([n+1] int32 on the host, from 0 to T)."""
        bounds = cu_seqlens.to(torch.int64)
        starts, lengths = bounds[:-1], bounds.diff()
        rounded = torch.clamp(2 ** torch.ceil(torch.log2(lengths.clamp(min=1).double())).long(), min=SMALLEST_CLASS)
        shapes, index, filled = [], [], []
        slots, offset = torch.empty(int(bounds[-1]), dtype=torch.int64), 0
        for size in rounded.unique().tolist():
            members = (rounded == size).nonzero().flatten()
            ramp = torch.arange(int(lengths[members].max()))
            inside = ramp < lengths[members, None]  # [n, m]
            position = starts[members, None] + torch.minimum(ramp, (lengths[members, None] - 1).clamp(min=0))
            slot = offset + torch.arange(inside.numel()).view_as(inside)
            slots[position[inside]] = slot[inside]
            shapes.append((inside.size(0), inside.size(1)))
            index.append(position.flatten())
            filled.append(inside.flatten())
            offset += inside.numel()
        maps = [send(each, device) for each in (torch.cat(index), slots, torch.cat(filled))]
        return LengthClasses(tuple(shapes), *maps)


def attend_by_length(attend: Attend, query: Tensor, key: Tensor, value: Tensor, classes: LengthClasses) -> Tensor:
    """[T, heads, E]: context of packed query [T, heads, D] in keys [T, groups, D] and values [T, groups, E].

    Tokens attend within their own sequence: `attend` is given one length class after the other, each a batch.
    """
    padded = [_ToClasses.apply(x, classes.index, classes.slots) for x in (query, key, value)]
    contexts, offset = [], 0
    for count, length in classes.shapes:
        end = offset + count * length
        q, k, v = (x[offset:end].unflatten(0, (count, length)).transpose(1, 2) for x in padded)
        contexts.append(attend(q, k, v).transpose(1, 2).flatten(0, 1))
        offset = end
    context = contexts[0] if len(contexts) == 1 else torch.cat(contexts)
    return _ToPacked.apply(context, classes.index, classes.slots, classes.filled)


class _ToClasses(torch.autograd.Function):
    """[T, ...] packed -> [slots, ...] padded; both directions are gathers.

    The gradient of a padding slot is exactly zero: no real query sees a later slot, and the padding queries' outputs
    are dropped. So the backward needs to read the real slots only.
    """

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, packed: Tensor, index: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        return packed.index_select(0, index)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        (slots,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return grad.index_select(0, slots), None, None


class _ToPacked(torch.autograd.Function):
    """[slots, ...] padded -> [T, ...] packed; the inverse of `_ToClasses` on the real slots."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, padded: Tensor, index: Tensor, slots: Tensor, filled: Tensor
    ) -> Tensor:
        ctx.save_for_backward(index, filled)
        return padded.index_select(0, slots)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        index, filled = ctx.saved_tensors  # type: ignore[attr-defined]
        shape = [filled.numel()] + [1] * (grad.dim() - 1)
        return grad.index_select(0, index) * filled.view(shape), None, None, None
