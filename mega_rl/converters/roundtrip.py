"""Import and export of a checkpoint for a layout without a model and without writing: does every bit come back?"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch

from mega_rl.converters.blocks import matrix_shape
from mega_rl.converters.export import assemble_bucket
from mega_rl.converters.fill import BlockReader, fill
from mega_rl.converters.plan import ParamPlan, Sharding, common_plan, expert_plan, export_plan, hf_tensors
from mega_rl.converters.proof import prove_complete

Members = list[dict[str, ParamPlan]]


def round_trip(
    reader: BlockReader,
    sharding: Sharding,
    *,
    share: tuple[int, int] = (0, 1),
    advance: Callable[[int], None] = lambda nbytes: None,
) -> tuple[int, tuple[str, ...]]:
    """(tensors that come back bit for bit, names of those that do not).

    Each parameter is cut as every rank of the layout would hold it, and the Hugging Face tensors are put together from
    those parts, one unit of the export plan at a time: memory is that of a few tensors. Absent optional tensors are
    left out. `share` (i, n) does every nth unit from the ith on.
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
        members = stages[unit.pp_rank, unit.vp_stage][unit.of_experts]
        dtype = reader.tensors[unit.tensors[0][0]].dtype
        gathered = torch.empty(len(members), unit.numel, dtype=dtype)
        sizes = [prod(param.shape) for param in unit.params]
        for row, plans in zip(gathered, members, strict=True):
            for part, param in zip(torch.split(row, sizes), unit.params, strict=True):
                fill(part.view(param.shape), plans[param.name].copies, reader)
        for name, tensor in assemble_bucket([unit], gathered):
            source = reader.read_block(name, *((0, size) for size in matrix_shape(tuple(tensor.shape))))
            same = source.dtype == tensor.dtype and torch.equal(_bits(source), _bits(tensor))
            good += same
            bad += [] if same else [name]
            advance(tensor.nbytes)
    bad += [name for name in expected if name in reader.tensors and name not in made]
    return good, tuple(bad)


def _members(sharding: Sharding, pp_rank: int, vp_stage: int) -> tuple[Members, Members]:
    """What the ranks hold of one stage, by parameter name: the common part, and the experts."""
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


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
