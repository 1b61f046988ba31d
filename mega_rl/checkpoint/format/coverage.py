"""Coverage of a tensor by pieces: each inside it, every element exactly once. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from mega_rl.checkpoint.format.shards import PieceSpec


def is_inside(piece: PieceSpec, shape: tuple[int, ...]) -> bool:
    """Return whether a piece is a box within a tensor of this shape."""
    return len(piece.offset) == len(piece.shape) == len(shape) and all(
        o + n <= size for o, n, size in zip(piece.offset, piece.shape, shape, strict=True)
    )


def missing_elements(pieces: Sequence[PieceSpec], shape: tuple[int, ...]) -> int:
    """Return the tensor's elements less those of the pieces; 0 without overlap means full coverage."""
    return prod(shape) - sum(prod(piece.shape) for piece in pieces)


def overlap(pieces: Sequence[PieceSpec]) -> tuple[PieceSpec, PieceSpec] | None:
    """Return two pieces that share an element, or None.

    Separates pieces by planes until each is alone, which takes few rounds for the cuts of cuts that layouts make.
    Compares pieces that no plane separates one by one.
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
    """Split a group by planes between its pieces, along the first dimension that has such planes."""
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
    """Compare each piece with those that it meets along the first dimension; return an overlapping pair or None."""
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
