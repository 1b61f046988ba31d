"""Buckets of Hugging Face tensors in which weights travel, and the memory that they take.

Plain arithmetic over the export plan, the same on all ranks. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import prod
from typing import NamedTuple

from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.plan.export import ExportUnit, export_plan
from mega_rl.converters.plan.ranks import build_plan
from mega_rl.converters.plan.sharding import Sharding
from mega_rl.parallel.layout import ParallelLayout

FLOAT32_BYTES = 4

# Changes of weights, measured: bytes per second that one core compares, codes, digests and loads; and the share of the
# bytes that travels after four steps at a learning rate of 1e-5, 3 to 6 % in bf16 (at 1e-6 1 %).
_WORK_RATE = 160e6
TYPICAL_CHANGES = 0.06


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


def sending_seconds(nbytes: float, link_rate: float) -> tuple[float, float]:
    """Return the seconds of (all weights, their changes) over a link of so many bytes per second."""
    return nbytes / link_rate, nbytes * (1 / _WORK_RATE + TYPICAL_CHANGES / link_rate)


def changes_pay_off(link_rate: float) -> bool:
    """Return whether changes arrive sooner than all weights over a link of so many bytes per second."""
    whole, changes = sending_seconds(1.0, link_rate)
    return changes < whole


def policy_bytes(hf: HFConfig, layout: ParallelLayout, itemsize: int) -> int:
    """Return the bytes of the parameters of the largest pipeline rank."""
    sharding = Sharding(hf, layout)
    stages = (
        [build_plan(sharding, layout.coordinates(rank), vp_stage=vp_stage) for vp_stage in range(layout.vpp)]
        for rank in first_ranks(layout)
    )
    return max(sum(prod(param.shape) for plan in stage for param in plan) for stage in stages) * itemsize


def first_ranks(layout: ParallelLayout) -> list[int]:
    """Return the first rank of every pipeline rank."""
    return [pp_rank * layout.stage_size for pp_rank in range(layout.pp)]
