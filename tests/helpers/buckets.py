"""Layout of gradient buckets, and the traffic of their collectives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucket, _ParamAndGradBucketGroup

from mega_rl.ddp.bucket_groups import SummingBucketGroup
from mega_rl.ddp.frozen import named_parameters

HEADINGS = ("chunk", "buffer", "bucket", "offset", "elements", "dtype", "parameter")
TRAFFIC = ("chunk", "buffer", "bucket", "operation", "ranks", "bytes sent", "by")


@dataclass(frozen=True)
class Place:
    """Place of one parameter's gradient in a bucket (its value's too, under the distributed optimizer)."""

    name: str  # Megatron-Core's, layers numbered over the whole model
    chunk: int
    buffer: str  # "dense", or "expert": reduced over fewer ranks; a second one of another dtype is "dense1", ...
    bucket: int
    offset: int  # elements from the start of the buffer
    numel: int
    dtype: torch.dtype  # of the gradient


@dataclass(frozen=True)
class Traffic:
    """Traffic of one bucket in an optimizer step, for any number of micro-batches."""

    chunk: int
    buffer: str
    bucket: int
    operation: str  # reduce_scatter, all_reduce, all_gather
    ranks: int  # of the group
    numel: int  # elements of the whole, as every rank holds or makes it; padding included
    dtype: torch.dtype  # that travels
    calls: tuple[str, ...]  # functions of torch.distributed that this rank calls

    @property
    def bytes_sent(self) -> int:
        """Bytes that leave a rank (mean over the group): each rank's part goes to every other rank, or twice."""
        passes = 2 if self.operation == "all_reduce" else 1
        return passes * self.numel * self.dtype.itemsize * (self.ranks - 1) // self.ranks


@dataclass(frozen=True)
class Buckets:
    """The buckets of a rank's model; `str()` gives two tables."""

    places: list[Place]
    traffic: list[Traffic]

    def place(self, name: str) -> Place:
        """Return the place of a parameter. Raises KeyError: it is not trained, or not on this rank."""
        for place in self.places:
            if place.name == name:
                return place
        raise KeyError(f"no trained parameter {name!r} on this rank")

    def bytes_sent(self) -> int:
        """Bytes that leave a rank in one optimizer step."""
        return sum(traffic.bytes_sent for traffic in self.traffic)

    def __str__(self) -> str:
        places = [(p.chunk, p.buffer, p.bucket, p.offset, p.numel, name_of(p.dtype), p.name) for p in self.places]
        traffic = [
            (t.chunk, t.buffer, t.bucket, t.operation, t.ranks, t.bytes_sent, ", ".join(t.calls)) for t in self.traffic
        ]
        return f"{table(HEADINGS, places)}\n\n{table(TRAFFIC, traffic)}\n{self.bytes_sent()} bytes per step and rank"


def describe(chunks: Sequence[DistributedDataParallel]) -> Buckets:
    """The buckets of wrapped chunks; no collective."""
    names = {parameter: name for name, parameter in named_parameters([chunk.module for chunk in chunks])}
    places: list[Place] = []
    traffic: list[Traffic] = []
    for number, chunk in enumerate(chunks):
        for kind, buffers, groups in (
            ("dense", chunk.buffers, chunk.bucket_groups),
            ("expert", chunk.expert_parallel_buffers, chunk.expert_parallel_bucket_groups),
        ):
            group_of = {id(bucket): group for group in groups for bucket in group.buckets}
            for index, buffer in enumerate(buffers):
                label = f"{kind}{index}" if index else kind
                for parameter, (start, end, bucket_id) in buffer.param_index_map.items():
                    places.append(
                        Place(names[parameter], number, label, bucket_id, start, end - start, buffer.grad_dtype)
                    )
                for bucket in buffer.buckets:
                    traffic += _traffic(number, label, bucket, group_of[id(bucket)])
    return Buckets(places, traffic)


def _traffic(
    chunk: int, buffer: str, bucket: _ParamAndGradBucket, group: _ParamAndGradBucketGroup
) -> Iterator[Traffic]:
    """A bucket's collectives of one step, in their order."""
    gradients, parameters = bucket.grad_data, bucket.param_data
    sharded = group.ddp_config.use_distributed_optimizer
    ranks = (group.intra_distributed_optimizer_instance_group if sharded else group.data_parallel_group).size()
    instances = group.ddp_config.num_distributed_optimizer_instances
    summing = isinstance(group, SummingBucketGroup)
    broadcasts = ("broadcast",) * (ranks if ranks > 1 else 0)
    calls: tuple[str, ...] = ("reduce_scatter_tensor",) if sharded else ("all_reduce",)
    if summing:
        calls = ("all_to_all_single",) * (group.exchanges(bucket) if ranks > 1 else 0)
        calls += () if sharded else broadcasts

    def entry(operation: str, size: int, numel: int, dtype: torch.dtype, calls: tuple[str, ...]) -> Traffic:
        return Traffic(chunk, buffer, bucket.bucket_id, operation, size, numel, dtype, calls)

    yield entry("reduce_scatter" if sharded else "all_reduce", ranks, gradients.numel(), gradients.dtype, calls)
    if instances > 1:
        across = group.inter_distributed_optimizer_instance_group.size()
        dtype = torch.float32 if summing else gradients.dtype
        count = group.exchanges(bucket) if summing else 1
        yield entry("all_reduce", across, gradients.numel() // ranks, dtype, ("all_reduce",) * count)
    if sharded:
        gather = broadcasts if summing and group.fast_gather else ("all_gather_into_tensor",)
        yield entry("all_gather", ranks, parameters.numel(), parameters.dtype, gather)


def table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns of text, numbers to the right."""
    cells = [list(headings), *[[str(value) for value in row] for row in rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headings))]
    right = [all(isinstance(row[column], int) for row in rows) for column in range(len(headings))]
    lines = [
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(row, widths, right, strict=True)
        )
        for row in cells
    ]
    return "\n".join(line.rstrip() for line in lines)


def name_of(dtype: torch.dtype) -> str:
    """Return a dtype's name: bfloat16, float32, ..."""
    return str(dtype).removeprefix("torch.")
