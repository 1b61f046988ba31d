"""Composition of index maps: a plan's sources, looked up where another plan stored them.

A plan's copies read sources; a source may itself be stored in parts. `compose` replaces every copy by copies of the
parts, `invert` turns the plan of loading a checkpoint into one of writing it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from mega_rl.converters.plan.blocks import Copy
from mega_rl.converters.plan.proof import tiling_faults
from mega_rl.converters.plan.ranks import ParamPlan


class Home(NamedTuple):
    """A rectangle of a whole parameter and the tensor that stores it.

    Of `copy`, src is the rectangle in the parameter and dst the one in the stored tensor.
    """

    stored: str
    copy: Copy


Homes = Mapping[str, Sequence[Home]]  # canonical parameter name -> homes


def home_faults(name: str, shape: tuple[int, ...], homes: Sequence[Home]) -> list[str]:
    """Return gaps and overlaps of a parameter's homes; empty if they hold each element exactly once."""
    rectangles = [(c.src_row, c.src_row + c.rows, c.src_col, c.src_col + c.cols) for _, c in homes]
    return [f"{name} {fault}" for fault in tiling_faults(tuple(rectangles), shape)]


def compose(copies: Iterable[Copy], homes: Homes) -> tuple[Copy, ...]:
    """Return the same copies, reading stored tensors instead of whole parameters; zero rows stay.

    The homes of each parameter read must tile it.
    """
    composed: list[Copy] = []
    for copy in copies:
        if copy.hf_name is None:
            composed.append(copy)
        else:
            composed += [part for home in homes[copy.hf_name] if (part := _from_home(copy, home)) is not None]
    return tuple(composed)


def _from_home(copy: Copy, home: Home) -> Copy | None:
    """The part of a copy that lies in a home, None if they do not meet."""
    assert not copy.transposed or copy.step == 1, copy
    height, width = copy.src_shape
    top, bottom = _overlap(copy.src_row, height, home.copy.src_row, home.copy.rows)
    left, right = _overlap(copy.src_col, width, home.copy.src_col, home.copy.cols)
    if top >= bottom or left >= right:
        return None
    down, along = top - copy.src_row, left - copy.src_col
    rows, cols = bottom - top, right - left
    return Copy(
        home.stored,
        top - home.copy.src_row + home.copy.dst_row,
        left - home.copy.src_col + home.copy.dst_col,
        copy.dst_row + (along if copy.transposed else down),
        copy.dst_col + (down * copy.dst_step if copy.transposed else along),
        cols if copy.transposed else rows,
        rows if copy.transposed else cols,
        copy.transposed,
        dst_step=copy.dst_step,
    )


def rows_of(copies: Iterable[Copy], low: int, high: int) -> tuple[Copy, ...]:
    """Return the part of copies in rows [low, high) of their target, counted from 0; transposed ones are not cut."""
    inside = []
    for copy in copies:
        first, last = max(copy.dst_row, low), min(copy.dst_row + copy.rows, high)
        if first < last and copy.transposed:
            assert (first, last) == (copy.dst_row, copy.dst_row + copy.rows), copy
            inside.append(copy)
        elif first < last:
            src_row = copy.src_row + first - copy.dst_row
            inside.append(copy._replace(src_row=src_row, dst_row=first - low, rows=last - first))
    return tuple(inside)


def _overlap(first: int, count: int, other: int, other_count: int) -> tuple[int, int]:
    return max(first, other), min(first + count, other + other_count)


def invert(plans: Iterable[ParamPlan]) -> dict[str, list[Copy]]:
    """Return for each source tensor the copies that write it back from whole parameters.

    `plans` are those of one rank that holds the whole model, with origin "disk".
    """
    inverse: dict[str, list[Copy]] = {}
    for plan in plans:
        for c in plan.copies:
            if c.hf_name is not None:
                rows, cols = (c.cols, c.rows) if c.transposed else (c.rows, c.cols)
                place = (c.dst_row, c.dst_col, c.src_row, c.src_col, rows, cols)
                back = Copy(plan.canonical, *place, c.transposed, dst_step=c.step)
                inverse.setdefault(c.hf_name, []).append(back)
    return inverse
