"""Hugging Face tensors out of a live Megatron-Core model: the load plan read backwards, in buckets.

The sequence of tensors and of collectives follows from the config and the layout alone, so no rank asks another what
comes next. Within a bucket the owning pipeline stage first broadcasts each rank's shards, then every tensor-parallel
group gathers them: across stages, usually the slower link, a byte travels once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mega_rl.converters.live.load import weights_of
from mega_rl.converters.live.place import Members, ModelPlace
from mega_rl.converters.plan.export import ExportPiece, ExportUnit, export_plan
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.storage.matrix import matrix_shape


def export_hf(
    chunks: Sequence[nn.Module], place: ModelPlace, *, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, full tensor) of every weight, the same on all ranks of a replica, in the model's order.

    Collective over the replica: every rank must exhaust the iterator. Tensors are contiguous, on the device of the
    parameters, cast to `dtype` before they travel, and the consumer's to keep: they share no memory with the model.
    It needs one buffer more, of `place.bucket_bytes` (a larger unit is a bucket alone) times the ranks that gather; a
    single rank needs none. Tied models have no lm_head.weight; padding of the vocabulary is cut off. `chunks` are
    unwrapped GPTModels of either spec.
    """
    layout = place.sharding.layout
    plan = export_plan(place.sharding)
    live = [weights_of(chunk) for chunk in chunks]
    assert not any(name == "output_layer.bias" for params in live for name in params), "heads have no bias on disk"
    usual = usual_dtype(chunks) if dtype is None else dtype
    in_buckets = list(buckets(plan, bucket_bytes=place.bucket_bytes, itemsize=usual.itemsize))
    room = 0 if place.is_whole else max(_gathered_bytes(bucket, layout, usual) for bucket in in_buckets)
    # The same memory for every bucket: new memory would cost more time than the copy into it.
    device = next(weight.device for params in live for weight in params.values())  # a chunk may have no weights
    buffer = torch.empty(room, dtype=torch.uint8, device=device)
    for bucket in in_buckets:
        unit = bucket[0]
        wire = torch.float32 if unit.float32 else usual
        members = place.experts if unit.of_experts else place.tensor_parallel
        shards = None
        if unit.pp_rank == place.coordinates.pp_rank:
            shards = [live[u.vp_stage][param.name] for u in bucket for param in u.params]
        if members.size == layout.pp == 1:  # one rank holds all of it
            assert shards is not None
            yield from _assemble(bucket, [[shard.detach() for shard in shards]], wire)
            continue
        numel = sum(unit.numel for unit in bucket)
        gathered = buffer[: members.size * numel * wire.itemsize].view(wire).view(members.size, numel)
        if shards is not None:
            _flatten(shards, into=gathered[members.rank])
        _exchange(gathered, members, owner=unit.pp_rank, pp_group=place.pp_group if layout.pp > 1 else None)
        yield from assemble_bucket(bucket, gathered)


def buckets(plan: Sequence[ExportUnit], *, bucket_bytes: int, itemsize: int) -> Iterator[list[ExportUnit]]:
    """Yield consecutive units of one pipeline rank, group and dtype, of at most `bucket_bytes` or of one unit."""
    bucket: list[ExportUnit] = []
    size = 0
    for unit in plan:
        nbytes = unit.numel * (4 if unit.float32 else itemsize)
        if bucket and (size + nbytes > bucket_bytes or _kind(unit) != _kind(bucket[0])):
            yield bucket
            bucket, size = [], 0
        bucket.append(unit)
        size += nbytes
    if bucket:
        yield bucket


def _gathered_bytes(bucket: Sequence[ExportUnit], layout: ParallelLayout, usual: torch.dtype) -> int:
    """Return the bytes of all members' parts of a bucket."""
    members = layout.ep * layout.etp if bucket[0].of_experts else layout.tp
    return members * sum(unit.numel for unit in bucket) * (4 if bucket[0].float32 else usual.itemsize)


def _kind(unit: ExportUnit) -> tuple[int, bool, bool]:
    """Return the properties that all units of a bucket share."""
    return unit.pp_rank, unit.of_experts, unit.float32


def assemble_bucket(bucket: Sequence[ExportUnit], gathered: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield full tensors from `gathered` [members, elements]: a member's parts of the bucket, one after another."""
    shapes = [param.shape for unit in bucket for param in unit.params]
    sizes = [prod(shape) for shape in shapes]
    shards = [
        [part.view(shape) for part, shape in zip(torch.split(row, sizes), shapes, strict=True)] for row in gathered
    ]
    yield from _assemble(bucket, shards, gathered.dtype)


def _assemble(
    bucket: Sequence[ExportUnit], shards: Sequence[Sequence[Tensor]], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield full tensors from shards[member][position of the parameter in the bucket]."""
    first = 0
    for unit in bucket:
        parts = [
            [row[first + i].reshape(matrix_shape(param.shape)) for i, param in enumerate(unit.params)] for row in shards
        ]
        first += len(unit.params)
        for name, shape, pieces in unit.tensors:
            yield name, join_pieces(parts, shape, pieces, dtype)


def join_pieces(
    parts: Sequence[Sequence[Tensor]], shape: tuple[int, ...], pieces: Sequence[ExportPiece], dtype: torch.dtype
) -> Tensor:
    """Return a Hugging Face tensor from parts[member][parameter], matrices; the pieces tile it, no value is left."""
    result = torch.empty(shape, dtype=dtype, device=parts[0][0].device)
    matrix = result.view(matrix_shape(shape))
    for member, param, c in pieces:
        source = parts[member][param][c.dst_row : c.dst_row + c.rows, c.dst_col : c.dst_col + c.cols]
        rows, cols = c.src_shape
        target = matrix[c.src_row : c.src_row + rows, c.src_col : c.src_col + cols : c.step]
        target.copy_(source.T if c.transposed else source)
    return result


def _flatten(shards: Sequence[Tensor], *, into: Tensor) -> None:
    """Copy this rank's parts one after the other, cast."""
    parts = torch.split(into, [shard.numel() for shard in shards])
    for part, shard in zip(parts, shards, strict=True):
        part.copy_(shard.detach().reshape(-1))


def _exchange(gathered: Tensor, members: Members, *, owner: int, pp_group: dist.ProcessGroup | None) -> None:
    """Fill [members, elements] on every stage from each member's row on the stage `owner`, as plain bytes."""
    group, _, mine = members
    rows = [row.view(torch.uint8) for row in gathered]
    if pp_group is not None:
        dist.broadcast(rows[mine], group=pp_group, group_src=owner)
    if len(rows) == 1:
        return
    assert group is not None
    if dist.get_backend(group) == "gloo":
        # Its broadcast moves bytes several times faster than its gather.
        for member, row in enumerate(rows):
            dist.broadcast(row, group=group, group_src=member)
    else:
        dist.all_gather_single(gathered.view(torch.uint8).view(-1), rows[mine], group=group)


def usual_dtype(chunks: Sequence[nn.Module]) -> torch.dtype:
    """Return the dtype of all parameters but those that are float32 in every model."""
    live = [weights_of(chunk) for chunk in chunks]
    dtypes = {param.dtype for params in live for name, param in params.items() if not _is_float32(name)}
    assert len(dtypes) == 1, f"parameters of several dtypes {dtypes}: say which to export"
    return dtypes.pop()


def _is_float32(name: str) -> bool:
    return name.endswith(".router.expert_bias") or name == "output_layer.weight"
