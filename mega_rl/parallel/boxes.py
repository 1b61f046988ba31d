"""Boxes of tensors: how the same elements lie in differently cut ones; pieces of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from torch import Tensor


class Box(NamedTuple):
    """A box of elements: `offset[i] <= index[i] < offset[i] + shape[i]`; () and () for a scalar."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """Part of a checkpoint's tensor under any layout: its owner saves `data`, every holder loads it."""

    name: str  # the whole tensor's: "actor/exp_avg/decoder.layers.3.mlp.linear_fc2.weight"
    global_shape: tuple[int, ...]
    box: Box  # its place in the whole
    data: Tensor  # [*box.shape] of any device and strides, a view of live memory
    owned: bool  # whether this rank writes it; over all ranks the owned pieces cover every element exactly once
    resizable: bool = False  # the whole's first dimension is padded by a layout's needs: loading takes what there is


@dataclass(frozen=True)
class EngineState:
    """State that an engine needs to resume as if it had never stopped."""

    pieces: list[Piece]
    numbers: dict[str, int | float]  # equal on all ranks, as JSON carries them: {"optimizer_steps": 12}


def whole(shape: tuple[int, ...]) -> Box:
    """The box of all elements of a tensor."""
    return Box((0,) * len(shape), shape)


def intersection(first: Box, second: Box) -> Box | None:
    """The elements in both, None where there are none. Both have as many dimensions."""
    assert len(first.shape) == len(second.shape), (first, second)
    low = tuple(map(max, first.offset, second.offset))
    ends = zip(first.offset, first.shape, second.offset, second.shape, strict=True)
    high = tuple(min(a + n, b + m) for a, n, b, m in ends)
    if any(h <= o for o, h in zip(low, high, strict=True)):
        return None
    return Box(low, tuple(h - o for o, h in zip(low, high, strict=True)))


def within(outer: Box, inner: Box) -> Box:
    """`inner` as seen from the first element of `outer`, which contains it."""
    return Box(tuple(i - o for i, o in zip(inner.offset, outer.offset, strict=True)), inner.shape)


def moved(box: Box, by: tuple[int, ...]) -> Box:
    """The box, with its offset increased by `by`."""
    return Box(tuple(o + b for o, b in zip(box.offset, by, strict=True)), box.shape)


def flat_boxes(shape: tuple[int, ...], start: int, end: int) -> Iterator[Box]:
    """Elements [start, end) of a tensor in row-major order as boxes, in that order.

    Every box is contiguous in that order too, so that box after box the range is gone through once. A matrix takes at
    most three: the rest of a row, whole rows, the beginning of a row.
    """
    assert 0 <= start <= end <= prod(shape), (shape, start, end)
    if start == end:
        return
    if not shape or (start, end) == (0, prod(shape)):
        yield whole(shape)
        return
    row = prod(shape[1:])
    first, last = start // row, end // row
    if start % row:
        stop = min(end, (first + 1) * row)
        yield from _in_row(shape, first, start - first * row, stop - first * row)
        first += 1
    if first < last:
        yield Box((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:]))
    if last >= first and end % row:
        yield from _in_row(shape, last, 0, end - last * row)


def _in_row(shape: tuple[int, ...], row: int, start: int, end: int) -> Iterator[Box]:
    for box in flat_boxes(shape[1:], start, end):
        yield Box((row, *box.offset), (1, *box.shape))
