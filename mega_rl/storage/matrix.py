"""Tensors of any rank seen as matrices. No torch."""

from __future__ import annotations

from math import prod


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return (rows, columns) of a tensor seen as a matrix: columns are its last dimension, a vector is one column."""
    return (prod(shape[:-1]), shape[-1]) if len(shape) > 1 else (prod(shape), 1)
