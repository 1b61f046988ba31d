"""Round trip of a checkpoint through import and export for a layout, in memory and without a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod

import torch
from torch import Tensor

from mega_rl.converters.live.copying import BlockReader, fill
from mega_rl.converters.plan.blocks import Copy
from mega_rl.converters.plan.export import ExportUnit, export_plan
from mega_rl.converters.plan.parameters import hf_tensors
from mega_rl.converters.plan.proof import prove_complete
from mega_rl.converters.plan.ranks import ParamPlan, common_plan, expert_plan
from mega_rl.converters.plan.sharding import Sharding
from mega_rl.storage.safetensors_header import matrix_shape
from mega_rl.storage.safetensors_reader import same_bits

CHUNK_BYTES = 16 << 20

Members = list[dict[str, ParamPlan]]


def round_trip(
    reader: BlockReader,
    sharding: Sharding,
    *,
    share: tuple[int, int] = (0, 1),
    advance: Callable[[int], None] = lambda nbytes: None,
) -> tuple[int, tuple[str, ...]]:
    """Return (number of tensors that come back bit for bit, names of those that do not).

    Each parameter is cut as every rank of the layout would hold it, and every piece of it is compared with the place
    that export would write it to. Memory is that of one unit of the export plan, seldom more than the largest tensor,
    and a few megabytes. Absent optional tensors are left out. `share` (i, n) does every nth unit from the ith on.
    """
    prove_complete(sharding)
    expected = hf_tensors(sharding.hf, head=sharding.head)
    stages = {stage: _members(sharding, *stage) for stage in sharding.layout.stages()}
    good, bad = 0, []
    units = export_plan(sharding)
    made = {name for unit in units for name, _, _ in unit.tensors}
    for unit in units[share[0] :: share[1]]:
        if not all(name in reader.tensors for name, _, _ in unit.tensors):
            continue
        parts = _filled(unit, stages[unit.pp_rank, unit.vp_stage][unit.of_experts], reader)
        for name, shape, pieces in unit.tensors:
            same = all(
                same_bits(source, part)
                for member, param, copy in pieces
                for source, part in _compared(reader, name, copy, parts[member][param])
            )
            good += same
            bad += [] if same else [name]
            advance(prod(shape) * reader.tensors[name].dtype.itemsize)
    bad += [name for name in expected if name in reader.tensors and name not in made]
    return good, tuple(bad)


def _filled(unit: ExportUnit, members: Members, reader: BlockReader) -> list[list[Tensor]]:
    """Return every member's part of every parameter of a unit, as a matrix, by member and position."""
    dtype = reader.tensors[unit.tensors[0][0]].dtype
    parts = []
    for plans in members:
        matrices = [torch.empty(matrix_shape(param.shape), dtype=dtype) for param in unit.params]
        for matrix, param in zip(matrices, unit.params, strict=True):
            fill(matrix, plans[param.name].copies, reader)
        parts.append(matrices)
    return parts


def _compared(reader: BlockReader, name: str, copy: Copy, part: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (tensor on disk, parameter) block by block, over the rectangle of one piece."""
    height, width = copy.src_shape
    here = part[copy.dst_row : copy.dst_row + copy.rows, copy.dst_col : copy.dst_col + copy.cols]
    here = here.T if copy.transposed else here
    step = max(1, CHUNK_BYTES // max(1, width * part.itemsize))
    for low in range(0, height, step):
        high = min(low + step, height)
        rows = (copy.src_row + low, copy.src_row + high)
        source = reader.read_block(name, rows, (copy.src_col, copy.src_col + width))
        yield source[:, :: copy.step], here[low:high]


def _members(sharding: Sharding, pp_rank: int, vp_stage: int) -> tuple[Members, Members]:
    """Return the ranks' plans of one stage by parameter name: the common part, and the experts."""
    layout = sharding.layout
    common = [common_plan(sharding, tp_rank, pp_rank, vp_stage) for tp_rank in range(layout.tp)]
    experts = [
        expert_plan(sharding, ep_rank, etp_rank, pp_rank, vp_stage)
        for ep_rank in range(layout.ep)
        for etp_rank in range(layout.etp)
    ]
    return _by_name(common), _by_name(experts)


def _by_name(plans: list[tuple[ParamPlan, ...]]) -> Members:
    return [{param.name: param for param in plan} for plan in plans]
