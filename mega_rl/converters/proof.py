"""The static proof that a conversion loses nothing and writes nothing twice: interval arithmetic over all ranks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise

from mega_rl.converters.blocks import Copy, matrix_shape
from mega_rl.converters.hf_config import HFConfig
from mega_rl.converters.names import Spec
from mega_rl.converters.plan import Head, build_plan, hf_tensors, stages
from mega_rl.errors import UserErrors
from mega_rl.parallel.layout import ParallelLayout

Rectangle = tuple[int, int, int, int]  # row_lo, row_hi, col_lo, col_hi


def prove_complete(
    hf: HFConfig, layout: ParallelLayout, *, spec: Spec = "local", head: Head = "lm", padded_vocab: int | None = None
) -> None:
    """Checks, before any tensor is read, that the plans of all ranks lose nothing and write nothing twice.

    Every element of every parameter of every rank is written exactly once; every element of every Hugging Face tensor
    is used exactly once, where parameters that all tensor-parallel ranks hold and second homes count once. Raises
    UserErrors that lists every gap and overlap.
    """
    problems: list[str] = []
    used: dict[str, list[Rectangle]] = defaultdict(list)
    again: dict[tuple[str, str], list[Rectangle]] = defaultdict(list)
    owners: Counter[tuple[str, int]] = Counter()
    for pp_rank, vp_stage in stages(layout):
        whole: dict[str, tuple[Copy, ...]] = {}
        for tp_rank in range(layout.tp):
            coordinates = {"tp_rank": tp_rank, "pp_rank": pp_rank, "vp_stage": vp_stage}
            plan = build_plan(hf, layout, **coordinates, spec=spec, head=head, padded_vocab=padded_vocab)
            where = " ".join(f"{name}={at}" for name, at in coordinates.items())
            names = Counter(param.name for param in plan)
            problems += [f"{where}: {name} is planned {n} times" for name, n in names.items() if n > 1]
            for param in plan:
                rectangles = [(c.dst_row, c.dst_row + c.rows, c.dst_col, c.dst_col + c.cols) for c in param.copies]
                problems += [f"{where}: {param.name} {gap}" for gap in tiling_faults(rectangles, param.shape)]
                if param.replicated and whole.setdefault(param.canonical, param.copies) != param.copies:
                    problems.append(f"{where}: {param.name} is not that of tp_rank=0, yet every rank holds it whole")
                if param.replicated and tp_rank:
                    continue
                owners[param.canonical, tp_rank] += not param.replica
                for c in param.copies:
                    if c.hf_name is not None:
                        target = again[c.hf_name, param.canonical] if param.replica else used[c.hf_name]
                        target.append((c.src_row, c.src_row + c.rows, c.src_col, c.src_col + c.cols))
    problems += [f"{name} is held by {n} stages" for (name, _), n in owners.items() if n > 1]
    problems += _source_faults(hf_tensors(hf, head=head), used, again)
    if problems:
        raise UserErrors(problems)


def tiling_faults(rectangles: Iterable[Rectangle], shape: tuple[int, ...]) -> list[str]:
    """What keeps rectangles (row_lo, row_hi, col_lo, col_hi) from tiling a tensor exactly once, in words.

    Cuts the columns at every edge of a rectangle; within such a strip the rectangles are plain row intervals.
    """
    found = sorted(rectangles)
    num_rows, num_cols = matrix_shape(shape)
    edges = sorted({0, num_cols}.union(*((lo, hi) for _, _, lo, hi in found)))
    faults = []
    for left, right in pairwise(edges):
        columns = "" if (left, right) == (0, num_cols) else f" columns {left}..{right}"
        at = 0
        for row_lo, row_hi, col_lo, col_hi in found:
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
    return faults


def _source_faults(
    tensors: dict[str, tuple[tuple[int, ...], bool]],
    used: dict[str, list[Rectangle]],
    again: dict[tuple[str, str], list[Rectangle]],
) -> list[str]:
    """Gaps and overlaps on the Hugging Face side."""
    problems = [f"{name} is read but is no tensor of this model" for name in used if name not in tensors]
    for name, (shape, _) in tensors.items():
        problems += [f"{name} {fault}" for fault in tiling_faults(used.get(name, ()), shape)]
    for (name, param), rectangles in again.items():
        problems += [f"{name} for {param} {fault}" for fault in tiling_faults(rectangles, tensors[name][0])]
    return problems
