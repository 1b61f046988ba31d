"""Plans of all ranks read backwards: parameters gathered together, and the tensors made of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from math import prod
from typing import NamedTuple

from mega_rl.converters.plan.blocks import Copy
from mega_rl.converters.plan.parameters import HFTensor, Part, hf_tensors, in_model_order, stage_experts, stage_parts
from mega_rl.converters.plan.ranks import ParamPlan, common_plan, expert_plan, experts_of
from mega_rl.converters.plan.sharding import Sharding
from mega_rl.converters.safetensors.header import matrix_shape


class ExportPiece(NamedTuple):
    """A rectangle of one rank's parameter on its way back into a Hugging Face tensor."""

    member: int  # rank in the group that gathers the unit, one of its holders
    param: int  # position in the unit
    copy: Copy  # src is the Hugging Face side, dst the parameter's, as when loading


class ExportParam(NamedTuple):
    """A parameter of an export unit: name in the live chunk, shape of one rank's part."""

    name: str
    shape: tuple[int, ...]
    replicated: bool  # every member holds the same; pieces are then taken from the first


@dataclass(frozen=True)
class ExportUnit:
    """Parameters that are gathered together, and the Hugging Face tensors that come out of them.

    The members that gather are the tensor-parallel ranks, for experts the etp x ep ranks that hold all experts between
    them (etp fastest). Of those only `holders` have a part of this unit: an expert lies on the etp ranks of one
    expert-parallel rank, and parameters of its name on the others are other experts.
    """

    pp_rank: int
    vp_stage: int
    of_experts: bool
    float32: bool
    params: tuple[ExportParam, ...]
    tensors: tuple[tuple[str, tuple[int, ...], tuple[ExportPiece, ...]], ...]  # (Hugging Face name, full shape, pieces)
    holders: range = range(1)  # members that have a part

    @property
    def numel(self) -> int:
        """Elements of one rank's part."""
        return sum(prod(param.shape) for param in self.params)


@lru_cache(maxsize=8)
def export_plan(sharding: Sharding) -> tuple[ExportUnit, ...]:
    """Return the inverse over all ranks of a replica: every parameter once, layer by layer.

    The order depends only on the model, so every rank exports the same sequence, whatever the layout. Cached, because
    a run asks for it at each weight sync.
    """
    layout = sharding.layout
    if sharding.spec == "hf":
        assert layout.tp == layout.pp == layout.ep == layout.etp == 1, f"{layout} cuts tensors, which are whole"
        return tuple(_as_on_disk(unit) for unit in export_plan(replace(sharding, spec="local")))
    shapes = hf_tensors(sharding.hf, head=sharding.head)
    order = {part.key: i for i, part in enumerate(in_model_order(sharding.hf, sharding.head))}
    units: list[tuple[int, ExportUnit]] = []
    for pp_rank, vp_stage in layout.stages():
        by_rank = [common_plan(sharding, tp_rank, pp_rank, vp_stage) for tp_rank in range(layout.tp)]
        columns = zip(stage_parts(sharding, pp_rank, vp_stage), zip(*by_rank, strict=True), strict=True)
        owned = [(part, plans) for part, plans in columns if not plans[0].replica]
        for _, group in groupby(
            owned, key=lambda column: (column[0].layer, column[0].rule.together or column[0].rule.param)
        ):
            members = list(group)
            unit = _unit([plans for _, plans in members], shapes, pp_rank, vp_stage, holders=range(layout.tp))
            units.append((order[members[0][0].key], unit))
        units += _expert_units(sharding, pp_rank, vp_stage, shapes, order)
    units.sort(key=lambda item: item[0])
    return tuple(unit for _, unit in units)


def _as_on_disk(unit: ExportUnit) -> ExportUnit:
    """Return the unit of chunks whose parameters are the tensors themselves."""
    tensors = []
    for position, (name, shape, _) in enumerate(unit.tensors):
        rows, cols = matrix_shape(shape)
        whole = Copy(name, src_row=0, src_col=0, dst_row=0, dst_col=0, rows=rows, cols=cols)
        tensors.append((name, shape, (ExportPiece(0, position, whole),)))
    params = tuple(ExportParam(name, shape, replicated=True) for name, shape, _ in unit.tensors)
    return replace(unit, params=params, tensors=tuple(tensors))


def _expert_units(
    sharding: Sharding,
    pp_rank: int,
    vp_stage: int,
    shapes: Mapping[str, HFTensor],
    order: Mapping[tuple[str, int, int], int],
) -> Iterator[tuple[int, ExportUnit]]:
    """Yield (place in the order, unit) of a stage's experts.

    A unit is one expert, or all experts of a layer where one tensor on disk holds them all.
    """
    hf, layout = sharding.hf, sharding.layout
    if hf.moe is None:
        return
    # Expert-parallel ranks whose experts meet in one tensor.
    together = [range(layout.ep)] if hf.fused_experts else [range(rank, rank + 1) for rank in range(layout.ep)]
    for ep_ranks in together:
        holders = range(ep_ranks.start * layout.etp, ep_ranks.stop * layout.etp)
        by_holder = [expert_plan(sharding, *divmod(holder, layout.etp), pp_rank, vp_stage) for holder in holders]
        parts = stage_experts(sharding, pp_rank, vp_stage, experts_of(hf, layout, ep_ranks.start))
        groups: dict[tuple[int, object], list[tuple[Part, tuple[ParamPlan, ...]]]] = {}
        for part, plans in zip(parts, zip(*by_holder, strict=True), strict=True):
            key = part.rule.param if hf.fused_experts else part.expert
            groups.setdefault((part.layer, key), []).append((part, plans))
        for group in groups.values():
            plans_of = [plans for _, plans in group]
            unit = _unit(plans_of, shapes, pp_rank, vp_stage, holders=holders, of_experts=True)
            yield order[group[0][0].key], unit


def _unit(
    params: list[tuple[ParamPlan, ...]],
    shapes: Mapping[str, HFTensor],
    pp_rank: int,
    vp_stage: int,
    *,
    holders: range,
    of_experts: bool = False,
) -> ExportUnit:
    """Return a unit from its parameters, each as every holder has it."""
    pieces: dict[str, list[ExportPiece]] = {}
    for position, plans in enumerate(params):
        seen: set[str] = set()  # parts that several members hold come from the first of them
        for member, plan in zip(holders, plans, strict=True):
            if plan.replicated and plan.canonical in seen:
                continue
            seen.add(plan.canonical)
            for copy in (copy for copy in plan.copies if copy.hf_name is not None):
                pieces.setdefault(str(copy.hf_name), []).append(ExportPiece(member, position, copy))
    return ExportUnit(
        pp_rank,
        vp_stage,
        of_experts,
        params[0][0].float32,
        tuple(ExportParam(plans[0].name, plans[0].shape, plans[0].replicated) for plans in params),
        tuple((name, shapes[name].shape, tuple(of_one)) for name, of_one in pieces.items()),
        holders,
    )
