"""Comparison of two checkpoints, the check that a conversion loses nothing, and descriptions of checkpoints.

The first two stream: a few megabytes of two tensors are in memory at a time, or one unit of the export plan.
Descriptions read headers only.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from mega_rl.converters.hf.companions import config_changes
from mega_rl.converters.live.copying import BlockReader, ShapeAndDtype, TensorLike, blocks_of, fill
from mega_rl.converters.live.export import join_pieces
from mega_rl.converters.live.load import check_tensors
from mega_rl.converters.offline.checkpoint import open_checkpoint
from mega_rl.converters.plan.export import ExportUnit, export_plan
from mega_rl.converters.plan.parameters import as_on_disk, hf_tensors, ignored_tensors, outside
from mega_rl.converters.plan.proof import prove_complete
from mega_rl.converters.plan.ranks import ParamPlan, build_plan, common_plan, expert_plan
from mega_rl.converters.plan.sharding import Sharding
from mega_rl.converters.safetensors.header import matrix_shape
from mega_rl.converters.safetensors.reader import CheckpointReader, bits, same_bits
from mega_rl.errors import UserErrors
from mega_rl.parallel.layout import RankCoordinates
from mega_rl.tracking import progress


@dataclass(frozen=True)
class Different:
    """A tensor whose bits differ, and by how much."""

    name: str
    elements: int  # number of elements that differ
    numel: int
    max_abs: float  # largest |a - b|; nan if a value is not a number
    mean_abs: float
    max_of_first: float  # largest |a|, to judge the others by


@dataclass(frozen=True)
class Comparison:
    """Differences between two checkpoints; they are equal if every list is empty."""

    only_first: tuple[str, ...] = ()
    only_second: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()  # dtype or shape, in words
    different: tuple[Different, ...] = ()
    config: tuple[str, ...] = ()  # keys of config.json that differ, in words
    allowed: tuple[str, ...] = ()  # names in only one checkpoint that the caller allows
    num_equal: int = 0

    @property
    def equal(self) -> bool:
        """Return whether only allowed names differ."""
        return not (self.only_first or self.only_second or self.mismatched or self.different or self.config)


@dataclass(frozen=True)
class Verification:
    """Result of verifying a checkpoint."""

    layout: str  # its plan is proved complete
    comparison: Comparison | None = None  # with the second checkpoint
    returned: int | None = None  # tensors that come back bit for bit from import and export in memory
    lost: tuple[str, ...] = ()  # tensors that do not

    @property
    def equal(self) -> bool:
        """Return whether nothing is lost and nothing differs."""
        return not self.lost and (self.comparison is None or self.comparison.equal)


def verify_checkpoint(
    first: Path, second: Path | None, *, sharding: Sharding, allow_missing: Sequence[str] = ()
) -> Verification:
    """Prove a layout complete, then compare every bit of `first` with `second`.

    Without `second`: against itself after import and export for the layout, in memory. Raises UserErrors when the
    tensors are not those that config.json asks for.
    """
    layout = str(sharding.layout)
    if second is not None:
        prove_complete(sharding)
        return Verification(layout, compare_checkpoints(first, second, allow_missing=allow_missing))
    with CheckpointReader(first) as reader:
        hf = as_on_disk(sharding.hf, {name: info.shape for name, info in reader.tensors.items()})
        check_tensors(reader, hf, sharding.head, allow_missing=allow_missing)
        returned, lost = round_trip(reader, replace(sharding, hf=hf))
    return Verification(layout, returned=returned, lost=lost)


def compare_checkpoints(first: Path, second: Path, *, allow_missing: Sequence[str] = ()) -> Comparison:
    """Compare two checkpoints of one model, each of any kind, as Hugging Face tensors.

    If one of them is not a Hugging Face folder, tensors that conversion leaves out by name may be absent.
    """
    with ExitStack() as stack:
        a = stack.enter_context(open_checkpoint(first))
        b = stack.enter_context(open_checkpoint(second, reference=first if a.kind == "hf" else None))
        allowed = list(allow_missing)
        if converted := [side for side in (a, b) if side.kind != "hf"]:
            allowed += ignored_tensors(converted[0].hf, head=converted[0].sharding.head)
            allowed += {name for side in (a, b) for name in outside(a.hf, side.files.tensors, side.files.others)}
        fused = next((side.hf.fused_experts for side in (a, b) if side.kind == "hf"), None)
        comparison = compare(a.as_hf(fused_experts=fused), b.as_hf(fused_experts=fused), allow_missing=allowed)
    if a.kind == b.kind == "hf":
        # 8-bit blocks leave as bfloat16, and config.json says so.
        intended = [*allow_missing, *config_changes(a.hf)]
        comparison = replace(comparison, config=compare_configs(first, second, intended=intended))
    return comparison


def compare(first: BlockReader, second: BlockReader, *, allow_missing: Sequence[str] = ()) -> Comparison:
    """Compare the tensors of two readers by name, dtype, shape and bits.

    allow_missing: patterns of names that may be in only one.
    """
    ours, theirs = set(first.tensors), set(second.tensors)
    single = {name for name in ours ^ theirs if any(fnmatchcase(name, p) for p in allow_missing)}
    kinds = {name: (_kind(first.tensors[name]), _kind(second.tensors[name])) for name in sorted(ours & theirs)}
    names = sorted((name for name, (a, b) in kinds.items() if a == b), key=first.position)
    with progress.phase("comparing", total=sum(_nbytes(first.tensors[name]) for name in names), unit="B") as phase:
        results = [_compare_tensor(first, second, name, phase.advance) for name in names]
    different = sorted((one for one in results if one is not None), key=lambda one: one.name)
    return Comparison(
        only_first=tuple(sorted(ours - theirs - single)),
        only_second=tuple(sorted(theirs - ours - single)),
        mismatched=tuple(f"{name}: {a} against {b}" for name, (a, b) in kinds.items() if a != b),
        different=tuple(different),
        allowed=tuple(sorted(single)),
        num_equal=len(names) - len(different),
    )


def _compare_tensor(
    first: BlockReader, second: BlockReader, name: str, advance: Callable[[int], object]
) -> Different | None:
    """Return the difference of two tensors of one kind, if any. advance: takes the bytes compared."""
    elements, max_abs, total_abs, max_of_first, has_nan = 0, 0.0, 0.0, 0.0, False
    for block in blocks_of(first.tensors[name]):
        x, y = first.read_block(name, *block), second.read_block(name, *block)
        if not same_bits(x, y):
            changed = (bits(x) != bits(y)).view(x.numel(), -1).any(dim=1)
            values = x.contiguous().view(-1).double()
            gap = (values[changed] - y.contiguous().view(-1)[changed].double()).abs()
            elements, has_nan = elements + len(gap), has_nan or bool(gap.isnan().any())
            gap = gap.nan_to_num(0.0)
            max_abs, total_abs = max(max_abs, float(gap.max())), total_abs + float(gap.sum())
            max_of_first = max(max_of_first, float(values.nan_to_num(0.0).abs().max()))
        advance(x.nbytes)
    if not elements:
        return None
    numel, largest = prod(first.tensors[name].shape), float("nan") if has_nan else max_abs
    return Different(name, elements, numel, largest, total_abs / numel, max_of_first)


def compare_configs(first: Path, second: Path, *, intended: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the differences of two folders' config.json, a line each; empty if the bytes are equal.

    Keys that match a pattern of `intended` may differ. Equal values under other bytes (order, spaces) are a difference
    too: a config is copied, not written anew.
    """
    paths = [folder / "config.json" for folder in (first, second)]
    if missing := [path.parent for path in paths if not path.is_file()]:
        return (f"{missing[0]} has no config.json",) if len(missing) == 1 else ()
    texts = [path.read_bytes() for path in paths]
    if texts[0] == texts[1]:
        return ()
    a, b = (json.loads(text) for text in texts)
    keys = [key for key in {**a, **b} if key not in a or key not in b or a[key] != b[key]]
    lines = [
        f"{key}: {' against '.join(json.dumps(config[key]) if key in config else 'absent' for config in (a, b))}"
        for key in keys
        if not any(fnmatchcase(key, pattern) for pattern in intended)
    ]
    return tuple(lines) if keys else ("same values, other bytes",)


def round_trip(reader: BlockReader, sharding: Sharding) -> tuple[int, tuple[str, ...]]:
    """Return (number of tensors that come back bit for bit, names of those that do not).

    Each parameter is cut as every rank of the layout would hold it, and the tensors that export makes of the parts are
    compared with the reader's. Absent optional tensors are left out.
    """
    prove_complete(sharding)
    units = [u for u in export_plan(sharding) if all(name in reader.tensors for name, _, _ in u.tensors)]
    made = [name for unit in units for name, _, _ in unit.tensors]
    lost = [name for name in hf_tensors(sharding.hf, head=sharding.head) if name in reader.tensors.keys() - set(made)]
    stages = {stage: _members(sharding, *stage) for stage in sharding.layout.stages()}
    with progress.phase("round trip", total=sum(_nbytes(reader.tensors[name]) for name in made), unit="B") as phase:
        for unit in units:
            for name, tensor in _exported(unit, stages[unit.pp_rank, unit.vp_stage][unit.of_experts], reader):
                lost += [] if _is_on_disk(reader, name, tensor) else [name]
                phase.advance(tensor.nbytes)
    return len(made) - len(set(lost) & set(made)), tuple(sorted(lost))


def _exported(
    unit: ExportUnit, members: Sequence[Mapping[str, ParamPlan]], reader: BlockReader
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that export makes of a unit's parameters, as members would hold them."""
    dtype = reader.tensors[unit.tensors[0][0]].dtype
    parts = []
    for plans in members:
        parts.append([torch.empty(matrix_shape(param.shape), dtype=dtype) for param in unit.params])
        for matrix, param in zip(parts[-1], unit.params, strict=True):
            fill(matrix, plans[param.name].copies, reader)
    for name, shape, pieces in unit.tensors:
        yield name, join_pieces(parts, shape, pieces, dtype)


def _is_on_disk(reader: BlockReader, name: str, tensor: Tensor) -> bool:
    """Return whether a checkpoint holds this tensor, bit for bit."""
    matrix = tensor.view(matrix_shape(tuple(tensor.shape)))
    blocks = blocks_of(reader.tensors[name])
    return all(same_bits(reader.read_block(name, rows, cols), matrix[slice(*rows)]) for rows, cols in blocks)


def _members(sharding: Sharding, pp_rank: int, vp_stage: int) -> tuple[list[dict[str, ParamPlan]], ...]:
    """Return the ranks' plans of one stage by parameter name: common ones, and experts'."""
    layout = sharding.layout
    common = [common_plan(sharding, tp_rank, pp_rank, vp_stage) for tp_rank in range(layout.tp)]
    experts = [
        expert_plan(sharding, *divmod(member, layout.etp), pp_rank, vp_stage)
        for member in range(layout.ep * layout.etp)
    ]
    return tuple([{param.name: param for param in plan} for plan in plans] for plans in (common, experts))


def _nbytes(tensor: TensorLike) -> int:
    return prod(tensor.shape) * tensor.dtype.itemsize


def _kind(tensor: TensorLike) -> str:
    """Return words like "bfloat16 [4, 8]"."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


@dataclass(frozen=True)
class Description:
    """A checkpoint against the table of its family, or that which a config.json announces."""

    num_tensors: int
    num_params: int
    nbytes: int
    dtypes: dict[str, int]  # number of tensors of each
    stages: tuple[dict[str, object], ...]  # layers, params, nbytes of each rank by pipeline rank
    ignored: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()  # those for which loading would refuse it


def describe(sharding: Sharding, reader: CheckpointReader | None) -> tuple[Sharding, Description]:
    """Return the sharding with the spellings on disk, and the description; reader: None without weights.

    Raises UserErrors when the model cannot be cut this way.
    """
    ignored, problems = tuple[str, ...](), tuple[str, ...]()
    tensors: Mapping[str, TensorLike]
    if reader is None:
        prove_complete(sharding)
        usual = getattr(torch, sharding.hf.dtype or "float32")
        tensors = {
            name: ShapeAndDtype(tensor.shape, torch.float32 if tensor.float32 else usual)
            for name, tensor in hf_tensors(sharding.hf, head=sharding.head).items()
            if not tensor.optional
        }
    else:
        tensors = reader.tensors
        hf = as_on_disk(sharding.hf, {name: info.shape for name, info in tensors.items()})
        sharding = replace(sharding, hf=hf)
        prove_complete(sharding)
        try:
            ignored, _ = check_tensors(reader, hf, sharding.head)
        except UserErrors as errors:
            problems = tuple(errors.problems)
    dtypes = Counter(tensor.dtype for tensor in tensors.values())
    sizes: Counter[int] = Counter()  # bytes by item size
    for tensor in tensors.values():
        sizes[tensor.dtype.itemsize] += _nbytes(tensor)
    return sharding, Description(
        num_tensors=len(tensors),
        num_params=sum(prod(tensor.shape) for tensor in tensors.values()),
        nbytes=sizes.total(),
        dtypes={str(dtype).removeprefix("torch."): count for dtype, count in dtypes.most_common()},
        stages=_stages(sharding, sizes.most_common(1)[0][0] if sizes else 0),
        ignored=ignored,
        problems=problems,
    )


def _stages(sharding: Sharding, itemsize: int) -> tuple[dict[str, object], ...]:
    """Return the size of each pipeline rank's share, which is that of each of its ranks."""
    layout, stages = sharding.layout, []
    for pp_rank in range(layout.pp):
        at = RankCoordinates(pp_rank=pp_rank)
        plans = [plan for vp_stage in range(layout.vpp) for plan in build_plan(sharding, at, vp_stage=vp_stage)]
        layers = [layout.layers_of(pp_rank, sharding.hf.num_layers, vp_stage) for vp_stage in range(layout.vpp)]
        stages.append(
            dict(
                pp_rank=pp_rank,
                layers=tuple(f"{held.start}-{held.stop - 1}" if held else "none" for held in layers),
                params=sum(prod(plan.shape) for plan in plans),
                nbytes=sum(prod(plan.shape) * (4 if plan.float32 else itemsize) for plan in plans),
            )
        )
    return tuple(stages)
