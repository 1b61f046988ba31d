"""Buffers of Megatron-Core's DistributedDataParallel: where parameters lie in them, padding, buckets and shards.

The rules are those of `megatron.core.distributed.param_and_grad_buffer` (0.16.1): parameters from last to first, each
from a multiple of 64 elements on, and each bucket rounded up to a multiple of the least common multiple of 128 and the
ranks, all of it under the distributed optimizer alone.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from mega_rl.plan.state.parameters import Parameter

_START, _END = 64, 128  # elements


@dataclass(frozen=True)
class Buffer:
    """One buffer: parameters of one dtype that one group of ranks reduces."""

    itemsize: int  # bytes of a parameter's element
    ranks: int  # that share it
    distributed: bool  # under the distributed optimizer
    spans: tuple[tuple[int, int], ...]  # first and last + 1 element of each parameter
    buckets: tuple[tuple[int, int], ...]
    of_experts: bool = False

    @property
    def numel(self) -> int:
        """Return the elements with padding."""
        return self.buckets[-1][1]

    @property
    def trained(self) -> int:
        """Return the elements without padding."""
        return sum(end - first for first, end in self.spans)

    def owned(self, index: int) -> int:
        """Return the elements of parameters that rank `index` of the group answers for."""
        if not self.distributed:
            return self.trained
        starts = [first for first, _ in self.spans]
        total = 0
        for first, end in self.buckets:
            size = (end - first) // self.ranks
            total += self._inside(starts, first + index * size, first + (index + 1) * size)
        return total

    def _inside(self, starts: Sequence[int], first: int, end: int) -> int:
        """Return the elements of parameters between two places."""
        total, at = 0, max(bisect_right(starts, first) - 1, 0)
        for start, stop in self.spans[at:]:
            if start >= end:
                break
            total += max(0, min(stop, end) - max(start, first))
        return total


@lru_cache(maxsize=64)
def lay_out(
    parameters: tuple[Parameter, ...], *, ranks: int, distributed: bool, bucket_size: int | None
) -> tuple[Buffer, ...]:
    """Return the buffers of trained parameters that `ranks` ranks share, one for each dtype.

    bucket_size: elements of a bucket; None: one bucket, shared embeddings aside.
    """
    return tuple(
        _buffer(
            [parameter for parameter in parameters if parameter.itemsize == itemsize],
            ranks=ranks,
            distributed=distributed,
            bucket_size=bucket_size,
        )
        for itemsize in _in_order(parameter.itemsize for parameter in parameters)
    )


def _buffer(parameters: Sequence[Parameter], *, ranks: int, distributed: bool, bucket_size: int | None) -> Buffer:
    end_multiple = math.lcm(ranks, _END) if distributed else 1
    spans: list[tuple[int, int]] = []
    buckets: list[tuple[int, int]] = []
    begin = at = 0
    is_open = False  # the bucket that begins at `begin` holds a parameter
    for parameter in reversed(parameters):
        at = _rounded(at, _START) if distributed else at
        alone = parameter.shared_embedding and distributed
        if alone and is_open:
            at = _rounded(at, end_multiple)
            buckets.append((begin, at))
            begin = at
        spans.append((at, at + parameter.numel))
        at, is_open = at + parameter.numel, True
        if alone or (bucket_size is not None and at - begin >= bucket_size):
            at = _rounded(at, end_multiple)
            buckets.append((begin, at))
            begin, is_open = at, False
    if is_open:
        buckets.append((begin, _rounded(at, end_multiple)))
    return Buffer(
        parameters[0].itemsize, ranks, distributed, tuple(spans), tuple(buckets), of_experts=parameters[0].of_expert
    )


def _in_order(values: Iterable[int]) -> list[int]:
    return list(dict.fromkeys(values))


def _rounded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
