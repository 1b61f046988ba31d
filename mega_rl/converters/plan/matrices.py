"""Matrices inside layers, as Muon orthogonalises them: their places in tensors on disk and in parameters.

Query, key, value, gate and up projection of every expert are matrices by themselves, also where a checkpoint or
Megatron-Core joins them. Embeddings, heads, routers and vectors are none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.plan.blocks import Block, Copy, source_blocks
from mega_rl.converters.plan.parameters import Part, in_model_order
from mega_rl.converters.plan.sharding import Head

_NAME = re.compile(r"\.\d+\.(?!(.*\.)?(gate|router)\b).*(\.weight|\.experts\.\w+)$")


class Tile(NamedTuple):
    """A rectangle of a matrix and its place in a tensor or parameter, which is seen as a matrix, too.

    Element (row + i, col + j) is the tensor's (top + i, left + j) or, `transposed`, (top + j, left + i * step).
    """

    matrix: int  # number in the model
    row: int
    col: int
    rows: int
    cols: int
    top: int = 0
    left: int = 0
    transposed: bool = False
    step: int = 1

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return self.rows * self.cols


def matrix_blocks(part: Part, hf: HFConfig) -> list[tuple[list[Block], tuple[int, ...]]]:
    """Return (blocks, (rows, columns)) of each matrix that makes a parameter; empty if one source is no matrix."""
    sources = [source_blocks(source, hf, part.layer, part.expert) for source in part.rule.sources]
    fits = (_NAME.search(str(b[0].hf_name)) and len(shape) == 2 and min(shape) > 1 for b, shape in sources)
    return sources if all(fits) else []


@lru_cache(maxsize=8)
def matrices(hf: HFConfig, head: Head) -> tuple[Sequence[tuple[int, ...]], Mapping[str, Sequence[Tile]]]:
    """Return ((rows, columns) of every matrix of a model, tiles of each tensor on disk that holds matrices)."""
    shapes: list[tuple[int, ...]] = []
    tiles: dict[str, list[Tile]] = {}
    for part in in_model_order(hf, head):
        for blocks, shape in matrix_blocks(part, hf):
            for b in blocks:
                place = (len(shapes), b.dst_row, 0, b.rows, shape[1], b.src_row, b.src_col, b.transposed, b.step)
                tiles.setdefault(str(b.hf_name), []).append(Tile(*place))
            shapes.append(shape)
    return shapes, tiles


def tiles_of(copies: Iterable[Copy], on_disk: Mapping[str, Sequence[Tile]]) -> Iterator[Tile]:
    """Yield the tiles of a rank's parameter that these copies fill; none if it is not made of matrices."""
    for copy in copies:
        for tile in on_disk.get(str(copy.hf_name), ()):
            down, along = copy.src_row - tile.top, copy.src_col - tile.left
            row, col = (along // tile.step, down) if tile.transposed else (down, along)
            if 0 <= row < tile.rows and 0 <= col < tile.cols and along % tile.step == 0:
                place = (tile.row + row, tile.col + col, copy.rows, copy.cols, copy.dst_row, copy.dst_col)
                yield Tile(tile.matrix, *place)
