"""Sums over whole sequences, which packing joins and context parallelism cuts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mega_rl.algorithms.statistics import identity


@dataclass(frozen=True)
class Sequences:
    """Response tokens of a micro-batch by their sequence.

    Sequences are the n rows of a data-parallel rank's mini-batch, of which a micro-batch has some, and none in part: a
    sum over one that is elsewhere is 0. n comes from the host, so no sum waits for the device.

    A loss remains a sum over tokens. It reads a sequence's number on each of its tokens (`spread`) and never adds up
    what `sum` returns, which every context-parallel rank has.
    """

    rows: Tensor  # [1, T] or [b, S] int64, number of the sequence from 1 on response tokens, 0 elsewhere
    count: int  # n
    # sum over the ranks that share these sequences, differentiable (`mega_rl.parallel.comm`)
    sum_over_context: Callable[[Tensor], Tensor] = identity

    def sum(self, x: Tensor) -> Tensor:
        """Return [n], in the dtype of `x`: its sum over each sequence's response tokens, those of other ranks included.

        `x` has the shape of `rows` and is floating. Differentiable; collective under context parallelism. What stands
        off the response tokens, even a NaN, touches neither sums nor gradient.
        """
        assert x.shape == self.rows.shape, f"x is {tuple(x.shape)}, the micro-batch {tuple(self.rows.shape)}"
        if self.count == 0:
            return x.new_zeros(0)
        sums = x.new_zeros(self.count + 1).index_add(0, self.rows.flatten(), x.flatten())
        return self.sum_over_context(sums[1:])

    def mean(self, x: Tensor) -> Tensor:
        """Return [n], like `sum`: the mean of `x` over each sequence's response tokens; 0 of a sequence without any."""
        return self.sum(x) / self.sum((self.rows > 0).to(x.dtype)).clamp(min=1.0)

    def spread(self, y: Tensor) -> Tensor:
        """Return, in the shape of `rows`, the number in `y`, [n], of each response token's sequence; 0 elsewhere.

        Differentiable. A NaN of one sequence reaches no token of another.
        """
        assert y.shape == (self.count,), f"y is {tuple(y.shape)} for {self.count} sequences"
        return torch.cat([y.new_zeros(1), y]).index_select(0, self.rows.flatten()).view(self.rows.shape)
