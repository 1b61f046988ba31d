"""Hugging Face tensors out of a live Megatron-Core model: the load plan read backwards, in buckets.

The sequence of tensors and of collectives follows only from the config and the layout, so no rank asks another what
comes next. Within a bucket the owning pipeline stage first broadcasts each rank's shards, then every tensor-parallel
group gathers them: across stages, usually the slower link, a byte travels once. An expert comes from the ranks that
hold it, by broadcast: a gather over all expert-parallel ranks would take as many experts at a time as there are ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import lcm, prod
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mega_rl.converters.live.load import weights_of
from mega_rl.converters.plan.adapters import A, B
from mega_rl.converters.plan.export import ExportPiece, ExportUnit, export_plan
from mega_rl.converters.plan.sharding import Sharding
from mega_rl.converters.safetensors.header import matrix_shape
from mega_rl.parallel.layout import RankCoordinates

if TYPE_CHECKING:
    from mega_rl.parallel.groups import Groups

BUCKET_BYTES = 512 << 20


class Members(NamedTuple):
    """Ranks that hold one part of a parameter each, and this rank among them."""

    group: ProcessGroup | None  # None: only this rank
    size: int
    rank: int


@dataclass(frozen=True)
class ModelPlace:
    """A model, its cut, and this rank's place. Groups of size 1 may be None."""

    sharding: Sharding
    coordinates: RankCoordinates = RankCoordinates()  # noqa: RUF009  immutable
    tp_group: ProcessGroup | None = None
    pp_group: ProcessGroup | None = None
    expert_group: ProcessGroup | None = None  # ep x etp, etp fastest
    is_sharded: bool = False  # data parallelism has cut the parameters: reading one is collective over those ranks
    bucket_bytes: int = BUCKET_BYTES  # size of parameters that are gathered together

    @classmethod
    def of(cls, sharding: Sharding, groups: Groups, *, is_sharded: bool, bucket_bytes: int) -> ModelPlace:
        """Return the place of this rank among the process groups of a run."""
        return cls(sharding, groups.coordinates, groups.tp, groups.pp, groups.experts, is_sharded, bucket_bytes)

    @property
    def tensor_parallel(self) -> Members:
        """Ranks that hold everything but experts between them, on this pipeline rank."""
        return Members(self.tp_group, self.sharding.layout.tp, self.coordinates.tp_rank)

    @property
    def experts(self) -> Members:
        """Ranks that hold all experts between them, on this pipeline rank."""
        layout, at = self.sharding.layout, self.coordinates
        return Members(self.expert_group, layout.ep * layout.etp, at.ep_rank * layout.etp + at.etp_rank)

    @property
    def is_whole(self) -> bool:
        """Return whether nothing but data parallelism has cut the model."""
        layout = self.sharding.layout
        return layout.tp * layout.pp * layout.ep * layout.etp == 1

    @property
    def needs_no_peer(self) -> bool:
        """Return whether this rank has every weight itself."""
        return self.is_whole and not self.is_sharded

    @property
    def gathers_first_copy(self) -> bool:
        """Return whether exporting the first copy of all weights takes this rank."""
        layout = self.sharding.layout
        return self.is_sharded or self._stage_rank < lcm(layout.tp, layout.ep * layout.etp)

    @property
    def is_first(self) -> bool:
        """Return whether this is the first rank of the first copy: the one that writes."""
        return self._stage_rank == 0 and self.coordinates.pp_rank == 0

    @property
    def _stage_rank(self) -> int:
        """Position among the ranks that share a pipeline rank."""
        layout, at = self.sharding.layout, self.coordinates
        return at.tp_rank + layout.tp * (at.cp_rank + layout.cp * at.dp_rank)


def export_hf(
    chunks: Sequence[nn.Module],
    place: ModelPlace,
    *,
    dtype: torch.dtype | None = None,
    own_stage: bool = False,
    only_adapters: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, full tensor) of every weight, on all ranks of a replica.

    Collective over the replica: every rank must exhaust the iterator. `own_stage`: only the weights of this rank's
    pipeline rank, and collective over the replica's ranks that share it. Tensors are contiguous, on the device of the
    parameters, cast to `dtype` before they travel, and the consumer's to keep: they share no memory with the model.
    It needs one buffer more, of `place.bucket_bytes` (a larger unit is one bucket) for all parts that are gathered;
    a single rank needs none. Tied models have no lm_head.weight; padding of the vocabulary is cut off. `chunks` are
    unwrapped GPTModels of either spec. `only_adapters`: only units that hold a part of an adapter are gathered.
    """
    stages = 1 if own_stage else place.sharding.layout.pp
    plan = export_plan(place.sharding)
    if own_stage:
        plan = tuple(unit for unit in plan if unit.pp_rank == place.coordinates.pp_rank)
    if only_adapters:
        plan = tuple(unit for unit in plan if any(name.endswith((A, B)) for name, _, _ in unit.tensors))
    live = [weights_of(chunk) for chunk in chunks]
    assert not any(name == "output_layer.bias" for params in live for name in params), "heads have no bias on disk"
    usual = usual_dtype(chunks) if dtype is None else dtype
    in_buckets = list(buckets(plan, bucket_bytes=place.bucket_bytes, itemsize=usual.itemsize))
    room = 0 if place.is_whole else max(_gathered_bytes(bucket, usual.itemsize) for bucket in in_buckets)
    # The same memory for every bucket: new memory would cost more time than the copy into it.
    device = next(weight.device for params in live for weight in params.values())  # a chunk may have no weights
    buffer = torch.empty(room, dtype=torch.uint8, device=device)
    for bucket in in_buckets:
        unit = bucket[0]
        wire = torch.float32 if unit.float32 else usual
        members = place.experts if unit.of_experts else place.tensor_parallel
        shards = None
        if unit.pp_rank == place.coordinates.pp_rank and members.rank in unit.holders:
            shards = [live[u.vp_stage][param.name] for u in bucket for param in u.params]
        if members.size == stages == 1:  # one rank holds all of it
            assert shards is not None
            yield from _assemble(bucket, [[shard.detach() for shard in shards]], wire)
            continue
        parts, numel = len(unit.holders), sum(unit.numel for unit in bucket)
        gathered = buffer[: parts * numel * wire.itemsize].view(wire).view(parts, numel)
        if shards is not None:
            own = torch.split(gathered[unit.holders.index(members.rank)], [shard.numel() for shard in shards])
            for part, shard in zip(own, shards, strict=True):
                part.copy_(shard.detach().reshape(-1))
        _exchange(gathered, members, unit, pp_group=place.pp_group if stages > 1 else None)
        sizes = [prod(param.shape) for unit in bucket for param in unit.params]
        yield from _assemble(bucket, [torch.split(row, sizes) for row in gathered], wire)


def buckets(plan: Sequence[ExportUnit], *, bucket_bytes: int, itemsize: int) -> Iterator[list[ExportUnit]]:
    """Yield consecutive units of one kind, at most `bucket_bytes` or one unit at a time.

    The parts of all holders count: that is what a rank has to have in memory.
    """
    bucket: list[ExportUnit] = []
    size, of_bucket = 0, None
    for unit in plan:
        nbytes, kind = _gathered_bytes([unit], itemsize), (unit.pp_rank, unit.of_experts, unit.float32, unit.holders)
        if bucket and (size + nbytes > bucket_bytes or kind != of_bucket):
            yield bucket
            bucket, size = [], 0
        bucket.append(unit)
        size, of_bucket = size + nbytes, kind
    if bucket:
        yield bucket


def _gathered_bytes(bucket: Sequence[ExportUnit], itemsize: int) -> int:
    """Return the bytes of all holders' parts of a bucket."""
    return len(bucket[0].holders) * sum(unit.numel for unit in bucket) * (4 if bucket[0].float32 else itemsize)


def _assemble(
    bucket: Sequence[ExportUnit], shards: Sequence[Sequence[Tensor]], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield full tensors from shards[holder][position of the parameter in the bucket]."""
    first = 0
    for unit in bucket:
        parts = [
            [row[first + i].reshape(matrix_shape(param.shape)) for i, param in enumerate(unit.params)] for row in shards
        ]
        first += len(unit.params)
        for name, shape, pieces in unit.tensors:
            own = [piece._replace(member=piece.member - unit.holders.start) for piece in pieces]
            yield name, join_pieces(parts, shape, own, dtype)


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


def _exchange(gathered: Tensor, members: Members, unit: ExportUnit, *, pp_group: ProcessGroup | None) -> None:
    """Fill [holders, elements] on all members and stages of `pp_group` from each holder's row.

    unit: any of the bucket's.
    """
    group, size, mine = members
    rows = dict(zip(unit.holders, (row.view(torch.uint8) for row in gathered), strict=True))
    if pp_group is not None and mine in rows:
        dist.broadcast(rows[mine], group=pp_group, group_src=unit.pp_rank)
    if size == 1:
        return
    assert group is not None
    if len(rows) < size or dist.get_backend(group) == "gloo":
        # Gloo's broadcast moves bytes several times faster than its gather.
        for holder, row in rows.items():
            dist.broadcast(row, group=group, group_src=holder)
    else:
        dist.all_gather_single(gathered.view(torch.uint8).view(-1), rows[mine], group=group)


def usual_dtype(chunks: Sequence[nn.Module]) -> torch.dtype:
    """Return the dtype of all parameters, except those that are float32 in every model."""
    live = [weights_of(chunk) for chunk in chunks]
    always = (".router.expert_bias", "output_layer.weight")
    dtypes = {param.dtype for params in live for name, param in params.items() if not name.endswith(always)}
    assert len(dtypes) == 1, f"parameters of several dtypes {dtypes}: say which to export"
    return dtypes.pop()
