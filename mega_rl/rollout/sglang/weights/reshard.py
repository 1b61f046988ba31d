"""Resharding plan: which rank writes which bytes of buckets of Hugging Face tensors.

Plain arithmetic over the export plan, the same on all ranks. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from math import prod
from typing import NamedTuple

from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.plan.blocks import Copy
from mega_rl.converters.plan.export import ExportUnit, export_plan
from mega_rl.converters.plan.ranks import build_plan
from mega_rl.converters.plan.sharding import Sharding
from mega_rl.parallel.layout import ParallelLayout, RankCoordinates

FLOAT32_BYTES = 4
# Smaller pieces are not cut: one more copy costs more than the other ranks would save.
_LEAST_BYTES = 64 << 10


class Slot(NamedTuple):
    """A Hugging Face tensor's place in a bucket."""

    name: str
    shape: tuple[int, ...]
    float32: bool  # else of the dtype in which weights travel
    start: int  # bytes
    end: int


@dataclass(frozen=True)
class Bucket:
    """Consecutive units of the model: their tensors lie back to back, float32 ones first.

    So every tensor starts at a multiple of its item size without gaps, as SGLang needs to view the bytes as tensors and
    as it assumes where it lays out a bucket itself.
    """

    units: tuple[ExportUnit, ...]
    slots: tuple[Slot, ...]

    @property
    def nbytes(self) -> int:
        """Return the bytes of all its tensors."""
        return self.slots[-1].end

    @property
    def pp_rank(self) -> int:
        """Return the pipeline rank of its first unit (of all units if `by_stage`)."""
        return self.units[0].pp_rank


class ParamWrites(NamedTuple):
    """Parts of a parameter that its rank writes; empty if other holders write all."""

    vp_stage: int
    param: str  # name in the live chunk
    parts: tuple[tuple[Slot, Copy], ...]  # src of a copy is the slot's side, dst the parameter's, as when loading


def plan_buckets(sharding: Sharding, *, bucket_bytes: int, itemsize: int, by_stage: bool = False) -> tuple[Bucket, ...]:
    """Return the model in buckets of at most `bucket_bytes`; a larger unit has its own.

    `itemsize`: bytes per element of the dtype in which weights travel. `by_stage`: no bucket has units of two pipeline
    ranks, and those of all pipeline ranks come in turn, so that each gathers its next one while others send. Tensors
    that SGLang fuses on arrival (query, key and value; gate and up; the two down projections of latent attention) come
    from one unit (`Rule.together`, or one parameter in Megatron-Core), and a unit is never split.
    """
    plan = export_plan(sharding)
    if not by_stage:
        return tuple(_buckets(plan, bucket_bytes, itemsize))
    stages = [[unit for unit in plan if unit.pp_rank == pp_rank] for pp_rank in range(sharding.layout.pp)]
    turns = zip_longest(*(_buckets(units, bucket_bytes, itemsize) for units in stages))
    return tuple(bucket for turn in turns for bucket in turn if bucket is not None)


def _buckets(plan: Sequence[ExportUnit], bucket_bytes: int, itemsize: int) -> Iterator[Bucket]:
    """Yield consecutive units in buckets of at most `bucket_bytes`; a larger unit has its own."""
    units: list[ExportUnit] = []
    size = 0
    for unit in plan:
        nbytes = sum(prod(shape) for _, shape, _ in unit.tensors) * (FLOAT32_BYTES if unit.float32 else itemsize)
        if units and size + nbytes > bucket_bytes:
            yield _bucket(units, itemsize)
            units, size = [], 0
        units.append(unit)
        size += nbytes
    yield _bucket(units, itemsize)


def _bucket(units: Sequence[ExportUnit], itemsize: int) -> Bucket:
    slots: list[Slot] = []
    at = 0
    for unit in sorted(units, key=lambda unit: not unit.float32):
        for name, shape, _ in unit.tensors:
            end = at + prod(shape) * (FLOAT32_BYTES if unit.float32 else itemsize)
            slots.append(Slot(name, shape, unit.float32, at, end))
            at = end
    return Bucket(tuple(units), tuple(slots))


def sending_bytes(hf: HFConfig, *, bucket_bytes: int, itemsize: int) -> int:
    """Return the most bytes of a device in which weights are sent by CUDA IPC.

    A tensor's gathered parts, the tensor, and the bucket that it fills, where the vocabulary's tensors are the largest;
    and two buckets that servers load, where gate and up are, which travel together. Servers load tensors whole, so that
    none is cut.
    """
    together = 2 * hf.ffn_hidden_size * hf.hidden_size * itemsize
    largest = max(hf.vocab_size * hf.hidden_size * itemsize, together)
    return 3 * max(bucket_bytes, largest) + 2 * max(bucket_bytes, together)


def policy_bytes(sharding: Sharding, itemsize: int) -> int:
    """Return the bytes of the parameters of the largest pipeline rank."""
    layout = sharding.layout
    stages = (
        [build_plan(sharding, layout.coordinates(rank), vp_stage=vp_stage) for vp_stage in range(layout.vpp)]
        for rank in first_ranks(layout)
    )
    return max(sum(prod(param.shape) for plan in stage for param in plan) for stage in stages) * itemsize


def first_ranks(layout: ParallelLayout) -> list[int]:
    """Return the first rank of every pipeline rank."""
    return [pp_rank * layout.stage_size for pp_rank in range(layout.pp)]


def covers(layout: ParallelLayout, ranks: Sequence[int], *, experts: bool) -> bool:
    """Return whether these ranks together hold a whole copy of the model."""
    places = [layout.coordinates(rank) for rank in ranks]
    common = {(place.pp_rank, place.tp_rank) for place in places}
    of_experts = {(place.pp_rank, place.ep_rank, place.etp_rank) for place in places}
    whole = len(common) == layout.pp * layout.tp
    return whole and (not experts or len(of_experts) == layout.pp * layout.ep * layout.etp)


def writes(
    buckets: Sequence[Bucket], layout: ParallelLayout, *, rank: int, ranks: Sequence[int]
) -> list[list[ParamWrites]]:
    """Return by bucket the parts that `rank` writes; `ranks` write each byte exactly once.

    Ranks that hold the same rectangle have equal shares of its rows. `ranks` cover the model. All parameters of this
    rank's stage are listed, in one order: to read one that is sharded over data parallelism is collective.
    """
    places = {place: layout.coordinates(place) for place in ranks}
    own_stage = layout.coordinates(rank).pp_rank

    @cache
    def holders(pp_rank: int, of_experts: bool, member: int | None) -> tuple[int, ...]:
        """Return the ranks that hold a rectangle, ascending; member None: any of the stage."""

        def number(at: RankCoordinates) -> int:
            return at.ep_rank * layout.etp + at.etp_rank if of_experts else at.tp_rank

        there = sorted(place for place, at in places.items() if at.pp_rank == pp_rank)
        return tuple(place for place in there if member in (None, number(places[place])))

    turns: dict[tuple[int, ...], int] = {}
    plans = []
    for bucket in buckets:
        slots = {slot.name: slot for slot in bucket.slots}
        own: list[ParamWrites] = []
        for unit in bucket.units:
            parts: list[list[tuple[Slot, Copy]]] = [[] for _ in unit.params]
            for name, piece in ((name, piece) for name, _, pieces in unit.tensors for piece in pieces):
                anywhere = not unit.of_experts and unit.params[piece.param].replicated
                there = holders(unit.pp_rank, unit.of_experts, None if anywhere else piece.member)
                assert there, f"no rank of {list(ranks)} holds {name}"
                shares = _shares(piece.copy, slots[name], there, rank, turns) if rank in there else ()
                parts[piece.param] += [(slots[name], share) for share in shares]
            if unit.pp_rank == own_stage:
                named = zip(unit.params, parts, strict=True)
                own += [ParamWrites(unit.vp_stage, param.name, tuple(part)) for param, part in named]
        plans.append(own)
    return plans


def _shares(
    copy: Copy, slot: Slot, holders: tuple[int, ...], rank: int, turns: dict[tuple[int, ...], int]
) -> Iterator[Copy]:
    """Yield this rank's rows of a rectangle; small rectangles go whole to holders in turn."""
    itemsize = (slot.end - slot.start) // prod(slot.shape)
    count, index = len(holders), holders.index(rank)
    if copy.rows * copy.cols * itemsize < _LEAST_BYTES or copy.rows < count:
        turn = turns.get(holders, 0)
        turns[holders] = (turn + 1) % count
        if turn == index:
            yield copy
        return
    low, high = copy.rows * index // count, copy.rows * (index + 1) // count
    row, col = (0, low * copy.step) if copy.transposed else (low, 0)
    yield copy._replace(
        src_row=copy.src_row + row, src_col=copy.src_col + col, dst_row=copy.dst_row + low, rows=high - low
    )
