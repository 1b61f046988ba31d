"""Matrices inside layers, as Muon orthogonalises them, and their places in tensors on disk and in parameters.

Query, key, value, gate and up projection of every expert are matrices by themselves, also where a checkpoint or
Megatron-Core joins them. Embeddings, heads, routers and vectors are none. Imports no torch, for the plan.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.plan.blocks import Copy, source_blocks
from mega_rl.converters.plan.parameters import Part, in_model_order
from mega_rl.converters.plan.sharding import Head

_IN_LAYER, _ROUTER = re.compile(r"\.\d+\."), re.compile(r"\.(gate|router)\b")


class Window(NamedTuple):
    """A rectangle of a matrix and its place in a tensor or parameter, which is seen as a matrix, too.

    Element (row + i, col + j) of the matrix is element (top + i, left + j) of the tensor or, where `transposed`,
    element (top + j, left + i * step).
    """

    matrix: int  # number in the model
    row: int
    col: int
    rows: int
    cols: int
    top: int
    left: int
    transposed: bool = False
    step: int = 1

    def holds(self, copy: Copy) -> bool:
        """Return whether the source of a copy, which lies in one matrix, lies in this window of the same tensor."""
        down, along = copy.src_row - self.top, copy.src_col - self.left
        if self.transposed:
            return 0 <= down < self.cols and along % self.step == 0 and 0 <= along < self.rows * self.step
        return 0 <= down < self.rows and 0 <= along < self.cols


def is_of_matrices(part: Part, hf: HFConfig) -> bool:
    """Return whether a parameter is made of matrices only."""
    names = [source.name.format(layer=part.layer, expert=part.expert) for source in part.rule.sources]
    shapes = [source_blocks(source, hf, part.layer, part.expert)[1] for source in part.rule.sources]
    return bool(names) and all(
        _IN_LAYER.search(name)
        and not _ROUTER.search(name)
        and (source.stacked or name.endswith(".weight"))
        and len(shape) == 2
        and min(shape) > 1
        for name, shape, source in zip(names, shapes, part.rule.sources, strict=True)
    )


@lru_cache(maxsize=8)
def matrices(hf: HFConfig, head: Head) -> tuple[Sequence[tuple[int, ...]], Mapping[str, Sequence[Window]]]:
    """Return ((rows, columns) of every matrix of a model, windows of each tensor on disk that holds matrices)."""
    shapes: list[tuple[int, ...]] = []
    windows: dict[str, list[Window]] = defaultdict(list)
    for part in (part for part in in_model_order(hf, head) if is_of_matrices(part, hf)):
        for blocks, shape in [source_blocks(source, hf, part.layer, part.expert) for source in part.rule.sources]:
            for b in blocks:
                place = (len(shapes), b.dst_row, 0, b.rows, shape[1], b.src_row, b.src_col)
                windows[str(b.hf_name)].append(Window(*place, b.transposed, b.step))
            shapes.append(shape)
    return shapes, dict(windows)


def windows_of(copies: Iterable[Copy], on_disk: Mapping[str, Sequence[Window]]) -> Iterator[Window]:
    """Yield the windows of a rank's parameter that these copies fill; none if it is not made of matrices."""
    for copy in copies:
        for window in (each for each in on_disk.get(str(copy.hf_name), ()) if each.holds(copy)):
            down, along = copy.src_row - window.top, copy.src_col - window.left
            row, col = (along // window.step, down) if window.transposed else (down, along)
            place = (window.row + row, window.col + col, copy.rows, copy.cols, copy.dst_row, copy.dst_col)
            yield Window(window.matrix, *place)
