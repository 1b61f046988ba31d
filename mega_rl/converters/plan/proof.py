"""Static proof that a conversion loses nothing and writes nothing twice: interval arithmetic over all ranks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise

from mega_rl.converters.plan.blocks import Copy
from mega_rl.converters.plan.parameters import hf_tensors
from mega_rl.converters.plan.ranks import ParamPlan, common_plan, expert_plan
from mega_rl.converters.plan.sharding import Sharding
from mega_rl.converters.safetensors.header import matrix_shape
from mega_rl.errors import UserErrors

Rectangle = tuple[int, int, int, int]  # row_lo, row_hi, col_lo, col_hi


def prove_complete(sharding: Sharding) -> None:
    """Check, before any tensor is read, that all ranks' plans lose nothing and write nothing twice.

    Every element of every parameter of every rank is written exactly once; every element of every Hugging Face tensor
    is used exactly once, where parameters that several ranks hold whole and second homes count once. Raises UserErrors
    that lists every gap and overlap, or every reason why the model cannot be cut this way. A process proves a sharding
    once: its actor and its reference have the same.
    """
    problems = _faults(sharding)
    if problems:
        raise UserErrors(problems)


@lru_cache(maxsize=8)
def _faults(sharding: Sharding) -> tuple[str, ...]:
    """Return every gap and overlap, in words."""
    tensors = hf_tensors(sharding.hf, head=sharding.head)
    problems: list[str] = []
    used: dict[str, list[Rectangle]] = defaultdict(list)  # rectangles read of each tensor
    again: dict[tuple[str, str], list[Rectangle]] = defaultdict(list)  # those that a second home reads once more
    owners: Counter[tuple[str, int]] = Counter()
    whole: dict[tuple[str, str], tuple[Copy, ...]] = {}
    for where, plan, index in _plans(sharding):
        names = Counter(param.name for param in plan)
        problems += [f"{where}: {name} is planned {n} times" for name, n in names.items() if n > 1]
        stage = where.partition(" pp_rank")[2]
        for param in plan:
            rectangles = [(c.dst_row, c.dst_row + c.rows, c.dst_col, c.dst_col + c.cols) for c in param.copies]
            gaps = tiling_faults(tuple(rectangles), param.shape)
            problems += [f"{where}: {param.name} {gap}" for gap in gaps]
            if param.replicated and whole.setdefault((stage, param.canonical), param.copies) != param.copies:
                problems.append(f"{where}: {param.name} is not that of rank 0, yet every rank holds it whole")
            if param.replicated and index:
                continue
            owners[param.canonical, index] += not param.replica
            for copy in (copy for copy in param.copies if copy.hf_name is not None):
                name = str(copy.hf_name)
                columns = matrix_shape(tensors[name].shape)[1] if name in tensors else 0
                rows, cols = (copy.cols, copy.rows) if copy.transposed else (copy.rows, copy.cols)
                # Columns of one turn count as neighbours: first all even ones, then all odd ones.
                left = copy.src_col // copy.step + copy.src_col % copy.step * (columns // copy.step)
                target = again[name, param.canonical] if param.replica else used[name]
                target.append((copy.src_row, copy.src_row + rows, left, left + cols))
    problems += [f"{name} is held by {n} stages" for (name, _), n in owners.items() if n > 1]
    problems += [f"{name} is read but is not a tensor of this model" for name in used if name not in tensors]
    for name, tensor in tensors.items():
        problems += [f"{name} {fault}" for fault in tiling_faults(tuple(used.get(name, ())), tensor.shape)]
    for (name, canonical), rectangles in again.items():
        faults = tiling_faults(tuple(rectangles), tensors[name].shape)
        problems += [f"{name} for {canonical} {fault}" for fault in faults]
    return tuple(problems)


def _plans(sharding: Sharding) -> Iterator[tuple[str, tuple[ParamPlan, ...], int]]:
    """Yield every distinct plan as (where, plan, index among the ranks that cut its parameters)."""
    layout = sharding.layout
    for pp_rank, vp_stage in layout.stages():
        stage = f"pp_rank={pp_rank} vp_stage={vp_stage}"
        for tp_rank in range(layout.tp):
            yield f"tp_rank={tp_rank} {stage}", common_plan(sharding, tp_rank, pp_rank, vp_stage), tp_rank
        if sharding.hf.moe is None:
            continue
        for ep_rank in range(layout.ep):
            for etp_rank in range(layout.etp):
                plan = expert_plan(sharding, ep_rank, etp_rank, pp_rank, vp_stage)
                yield f"ep_rank={ep_rank} etp_rank={etp_rank} {stage}", plan, etp_rank


@lru_cache(maxsize=4096)
def tiling_faults(rectangles: tuple[Rectangle, ...], shape: tuple[int, ...]) -> tuple[str, ...]:
    """Return the gaps and overlaps of rectangles (row_lo, row_hi, col_lo, col_hi) in a tensor, in words.

    Cuts the columns at every edge of a rectangle; within such a strip the rectangles are plain row intervals. Cached:
    the layers and experts of a model ask the same questions.
    """
    ordered = sorted(rectangles)
    num_rows, num_cols = matrix_shape(shape)
    if ordered == [(0, num_rows, 0, num_cols)]:
        return ()
    edges = sorted({0, num_cols}.union(*((lo, hi) for _, _, lo, hi in ordered)))
    faults = []
    for left, right in pairwise(edges):
        columns = "" if (left, right) == (0, num_cols) else f" columns {left}..{right}"
        at = 0
        for row_lo, row_hi, col_lo, col_hi in ordered:
            if col_lo >= right or col_hi <= left:
                continue
            if row_lo > at:
                faults.append(f"rows {at}..{row_lo}{columns} are missed")
            if row_lo < at:
                faults.append(f"rows {row_lo}..{min(at, row_hi)}{columns} are taken twice")
            at = max(at, row_hi)
        if at < num_rows and right <= num_cols:
            faults.append(f"rows {at}..{num_rows}{columns} are missed")
        if at > num_rows or (right > num_cols and at):
            faults.append(f"rows up to {at}{columns} lie outside its shape {list(shape)}")
    return tuple(faults)
