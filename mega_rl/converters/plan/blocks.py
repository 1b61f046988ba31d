"""Blocks and copies: a family's rule as affine blocks, cut to one rank's shard.

The only module that stacks tensors into parameters; ranks.py has the overview.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

from mega_rl.converters.architecture import HFConfig
from mega_rl.converters.families.rules import Rule, Source
from mega_rl.converters.safetensors.header import matrix_shape


class Block(NamedTuple):
    """Whole rows [dst_row, dst_row + rows) of a parameter, from a tensor; no tensor means zeros.

    Element (dst_row + i, j) is element (src_row + i, src_col + j) of the tensor or, where `transposed`, element
    (src_row + j, src_col + i * step).
    """

    hf_name: str | None
    dst_row: int
    rows: int
    src_row: int = 0
    src_col: int = 0
    transposed: bool = False
    step: int = 1


class Copy(NamedTuple):
    """A rectangle of a rank's parameter and its source in a tensor; `hf_name` None writes zeros.

    Rows and cols count in the parameter; element (dst_row + i, dst_col + j * dst_step) as in `Block`. Only transposed
    copies have steps.
    """

    hf_name: str | None
    src_row: int
    src_col: int
    dst_row: int
    dst_col: int
    rows: int
    cols: int
    transposed: bool = False
    step: int = 1
    dst_step: int = 1

    @property
    def src_shape(self) -> tuple[int, int]:
        """(rows, columns) of the source rectangle; with a step, columns in between included."""
        if self.transposed:
            return self.cols, (self.rows - 1) * self.step + 1
        return self.rows, self.cols


@dataclass(frozen=True)
class GlobalParam:
    """A parameter of the whole model before any cut.

    `sections` are row counts that add up to the rows; under `cut` "rows" each section is cut on its own and a rank
    holds its parts one below the other.
    """

    name: str  # canonical
    shape: tuple[int, ...]
    blocks: tuple[Block, ...]
    cut: Literal["none", "rows", "cols"]
    sections: tuple[int, ...]


def source_shape(source: Source, hf: HFConfig) -> tuple[int, ...]:
    """Sizes of a source tensor."""
    dims = hf.dims
    return tuple(dims[symbol] for symbol in source.shape)


def global_param(rule: Rule, hf: HFConfig, *, padded_vocab: int, layer: int = 0, expert: int = 0) -> GlobalParam:
    """A rule's parameter for one layer and expert: primitive by primitive, how tensors are stacked."""
    pieces = [source_blocks(source, hf, layer, expert) for source in rule.sources]
    rows = [sum(block.rows for block in piece) for piece, _ in pieces]
    item = pieces[0][1]
    cut: Literal["none", "rows", "cols"] = "rows"
    sections: tuple[int, ...] = (sum(rows),)
    blocks: list[Block]
    if rule.primitive == "qkv":
        # Group by group, each tensor's share of rows, as in Megatron-Core's fused query, key and value.
        blocks, at = [], 0
        for group in range(hf.num_kv_heads):
            for (piece, _), whole in zip(pieces, rows, strict=True):
                share = whole // hf.num_kv_heads
                blocks += _window(piece, group * share, share, at)
                at += share
    elif rule.primitive in ("gated", "sections"):
        starts = accumulate(rows, initial=0)
        moved = zip(pieces, starts, strict=False)
        blocks = [b._replace(dst_row=start + b.dst_row) for (piece, _), start in moved for b in piece]
        # One tensor may hold both halves already.
        sections = tuple(rows) if len(rows) > 1 else (rows[0] // 2, rows[0] // 2)
    else:
        blocks = pieces[0][0]
        if rule.primitive == "vocab":
            if padded_vocab > rows[0]:
                blocks.append(Block(None, rows[0], padded_vocab - rows[0]))
            sections = (padded_vocab,)
        elif rule.primitive != "col":
            cut = "cols" if rule.primitive == "row" else "none"
    name = param_name(rule, hf, layer=layer, expert=expert)
    return GlobalParam(name, (sum(sections), *item[1:]), tuple(blocks), cut, sections)


def param_name(rule: Rule, hf: HFConfig, *, layer: int = 0, expert: int = 0, spec: str = "local") -> str:
    """The rule's parameter name for one layer and expert, both counted as the caller counts."""
    return rule.name(spec).format(layer=layer, expert=expert, mtp=layer - hf.num_layers)


def _window(blocks: Sequence[Block], first: int, rows: int, at: int) -> list[Block]:
    """Return rows [first, first + rows) of blocks that follow each other, moved to row `at`."""
    window = []
    for block in blocks:
        low, high = max(first, block.dst_row), min(first + rows, block.dst_row + block.rows)
        if low < high:
            src_row = block.src_row + low - block.dst_row
            window.append(block._replace(dst_row=at + low - first, rows=high - low, src_row=src_row))
    return window


def source_blocks(source: Source, hf: HFConfig, layer: int, expert: int) -> tuple[list[Block], tuple[int, ...]]:
    """Return a tensor's rows as blocks from row 0 on, and their shape in the parameter."""
    shape = source_shape(source, hf)
    item = shape[1:] if source.stacked else shape or (1,)
    src_row, src_col, step = 0, 0, 1
    # A vector of a stack is a row there and a column here.
    transposed = source.transposed or (source.stacked and len(item) == 1)
    if source.stacked:
        src_row = expert * (1 if len(item) == 1 else item[0])
    rows, columns = (item[0], item[1:]) if not source.transposed else (item[1], item[:1])
    if source.part != "all":
        rows //= 2
        offset = {"second half": rows, "odd": 1}.get(source.part, 0)
        step = 2 if source.part in ("even", "odd") else 1
        src_row, src_col = (src_row, src_col + offset) if transposed else (src_row + offset, src_col)
        assert transposed or step == 1, f"{source.name}: only columns are taken in turns"
    name = source.name.format(layer=layer, expert=expert)
    if source.share is None:
        return [Block(name, 0, rows, src_row, src_col, transposed, step)], (rows, *columns)
    groups = hf.dims[source.share.groups]
    parts = [hf.dims[part] // groups for part in source.share.parts]  # rows in a group
    before, part = sum(parts[: source.share.index]), parts[source.share.index]
    blocks = [Block(name, group * part, part, group * sum(parts) + before) for group in range(groups)]
    return blocks, (groups * part, *columns)


def shard(param: GlobalParam, parts: int, index: int) -> tuple[tuple[int, ...], tuple[Copy, ...]]:
    """Shape and copies of part `index` of `parts` of a parameter."""
    num_cols = matrix_shape(param.shape)[1]
    if param.cut != "rows":
        width = num_cols // parts if param.cut == "cols" else num_cols
        left = width * index if param.cut == "cols" else 0
        copies = tuple(_copy(b, b.dst_row, b.dst_row + b.rows, 0, left, width) for b in param.blocks)
        return (*param.shape[:-1], width) if len(param.shape) > 1 else param.shape, copies
    copies_of_parts, start, at = [], 0, 0
    for section in param.sections:
        part = section // parts
        low = start + index * part
        inside = (b for b in param.blocks if b.dst_row < low + part and b.dst_row + b.rows > low)
        copies_of_parts += [_copy(b, low, low + part, at - low, 0, num_cols) for b in inside]
        start, at = start + section, at + part
    return (at, *param.shape[1:]), tuple(copies_of_parts)


def _copy(block: Block, low: int, high: int, shift: int, left: int, width: int) -> Copy:
    """Return the shard's copy of a block's rows [low, high), columns [left, left + width).

    `shift` is what a row of the parameter moves by.
    """
    first, last = max(block.dst_row, low), min(block.dst_row + block.rows, high)
    skipped = first - block.dst_row
    if block.transposed:
        row, col = block.src_row + left, block.src_col + skipped * block.step
    else:
        row, col = block.src_row + skipped, block.src_col + left
    return Copy(block.hf_name, row, col, first + shift, 0, last - first, width, block.transposed, block.step)
