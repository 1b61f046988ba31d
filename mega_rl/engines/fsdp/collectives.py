"""All-gather and reduce-scatter of FSDP2 on gloo, several times faster than gloo's own.

Source of the comparison: benchmarks/ddp.py and benchmarks/engines.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from mega_rl.ddp.reduce_scatter import Reduction, Scratch, Works, broadcast_shards, reduce_scatter_fp32


class _Memory:
    """Buffer allocation, shared by the all-gather and the reduce-scatter."""

    def allocate(self, size: Iterable[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return uninitialised memory."""
        return torch.empty(*size, dtype=dtype, device=device)


class BroadcastAllGather(_Memory):
    """All-gather as one broadcast of each rank's part."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> Works | None:
        """Gather each rank's `input_tensor` [n] into `output_tensor` [ranks * n]; return a handle when `async_op`."""
        parts = output_tensor.chunk(group.size())
        own = parts[group.rank()]
        if own.data_ptr() != input_tensor.data_ptr():
            own.copy_(input_tensor)
        works = broadcast_shards(parts, group=group)
        if async_op:
            return works
        works.wait()
        return None


class Fp32ReduceScatter(_Memory):
    """Reduce-scatter that adds messages of any dtype in FP32 and rank order."""

    def __init__(self, largest: int) -> None:
        """largest: bytes of the largest input."""
        self.scratch = Scratch(largest)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> Reduction | None:
        """Write this rank's part of the sum of all ranks' `input_tensor` [ranks * n] to `output_tensor` [n]."""
        return reduce_scatter_fp32(
            output_tensor, input_tensor, group=group, op=op, async_op=async_op, scratch=self.scratch
        )


def use_host_collectives(modules: Iterable[FSDPModule], group: ProcessGroup, *, largest: int) -> Scratch | None:
    """Use these collectives in the modules if `group` is of gloo; return the memory of pending messages, else None.

    largest: bytes of the gradients of the largest module.
    """
    if dist.get_backend(group) != "gloo":
        return None
    gather, scatter = BroadcastAllGather(), Fp32ReduceScatter(largest)
    for module in modules:
        module.set_custom_all_gather(cast(Any, gather))  # their base classes are private
        module.set_custom_reduce_scatter(cast(Any, scatter))
    return scatter.scratch
