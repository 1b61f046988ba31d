"""Whether pieces make up a tensor: each inside it, every element once. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from mega_rl.checkpoint.format.shards import PieceSpec


def is_inside(piece: PieceSpec, shape: tuple[int, ...]) -> bool:
    """Whether a piece is a box of a tensor of this shape."""
    return len(piece.offset) == len(piece.shape) == len(shape) and all(
        o + n <= size for o, n, size in zip(piece.offset, piece.shape, shape, strict=True)
    )


def missing_elements(pieces: Sequence[PieceSpec], shape: tuple[int, ...]) -> int:
    """Elements of the tensor less those of the pieces: 0 for pieces that do not overlap means that all are there."""
    return prod(shape) - sum(prod(piece.shape) for piece in pieces)


def overlap(pieces: Sequence[PieceSpec]) -> tuple[PieceSpec, PieceSpec] | None:
    """Two pieces that have an element in common, None if no two do.

    Pieces are parted by planes between them until each is alone, which takes few rounds for what layouts make: cuts of
    cuts. What no plane parts is compared one by one.
    """
    groups = [[piece for piece in pieces if prod(piece.shape)]]
    while groups:
        group = groups.pop()
        if len(group) < 2:
            continue
        parts = _parted(group)
        if len(parts) > 1:
            groups += parts
        elif (pair := _swept(group)) is not None:
            return pair
    return None


def _parted(group: list[PieceSpec]) -> list[list[PieceSpec]]:
    """Groups with planes between them, along the first dimension that has such planes."""
    for dim in range(len(group[0].shape)):
        parts: list[list[PieceSpec]] = []
        end = -1
        for piece in sorted(group, key=lambda piece: piece.offset[dim]):
            if piece.offset[dim] >= end:
                parts.append([])
            parts[-1].append(piece)
            end = max(end, piece.offset[dim] + piece.shape[dim])
        if len(parts) > 1:
            return parts
    return [group]


def _swept(group: list[PieceSpec]) -> tuple[PieceSpec, PieceSpec] | None:
    """Compares each piece with those that it meets along the first dimension."""
    active: list[PieceSpec] = []
    for piece in sorted(group, key=lambda piece: piece.offset[:1]):
        active = [a for a in active if not a.shape or a.offset[0] + a.shape[0] > piece.offset[0]]
        for other in active:
            if all(
                max(o, a) < min(o + n, a + m)
                for o, n, a, m in zip(piece.offset, piece.shape, other.offset, other.shape, strict=True)
            ):
                return other, piece
        active.append(piece)
    return None
