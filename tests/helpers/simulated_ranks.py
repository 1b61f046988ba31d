"""Ranks as threads of one process, for functions that need nothing of other ranks but sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

from torch import Tensor

Result = TypeVar("Result")
DEADLINE_S = 20.0


def on_simulated_ranks(functions: Sequence[Callable[[Callable[[Tensor], Tensor]], Result]]) -> list[Result]:
    """Return what each function gives, one per rank; it gets the sum of a tensor over all of them.

    The ranks must ask for the same number of sums. Raises BrokenBarrierError where one asks for more than another.
    """
    barrier, parts = Barrier(len(functions)), [Tensor()] * len(functions)

    def run(rank: int) -> Result:
        def sum_over_ranks(own: Tensor) -> Tensor:
            parts[rank] = own
            barrier.wait(DEADLINE_S)
            total = sum(parts[1:], start=parts[0].clone())
            barrier.wait(DEADLINE_S)  # a faster rank's next part must not replace one that is still to be read
            return total

        return functions[rank](sum_over_ranks)

    with ThreadPoolExecutor(len(functions)) as pool:
        return list(pool.map(run, range(len(functions))))
