"""Random order that depends on a key and on nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# Purposes of random orders, which keep their random numbers apart.
SPLIT, EPOCH, MINIBATCH, CURRICULUM, SUCCESS, STREAM = range(6)


def permutation(size: int, *, key: Sequence[int]) -> list[int]:
    """0 .. size-1 in random order, a pure function of size and key (non-negative integers).

    The order is that of raw Philox numbers, whose stream NumPy promises never to change (unlike that of its
    `Generator.permutation`), so that a run resumed on another version goes on in the same order.
    """
    numbers = np.random.Philox(np.random.SeedSequence(list(key))).random_raw(size)
    return np.argsort(numbers, kind="stable").tolist()
