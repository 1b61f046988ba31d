"""From a family's rule to a parameter as affine blocks, and from there to one rank's shard.

The only module that knows how tensors are stacked into parameters; see plan.py for the picture. Pure arithmetic, no
torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

from mega_rl.converters.families import Rule, Source
from mega_rl.converters.hf_config import HFConfig


class Block(NamedTuple):
    """Rows [dst_row, dst_row + rows) of a parameter are rows [src_row, ...) of a tensor; no tensor means zeros."""

    hf_name: str | None
    dst_row: int
    src_row: int
    rows: int


class Copy(NamedTuple):
    """A rectangle of a Hugging Face tensor and where it goes in a rank's parameter; `hf_name` None writes zeros."""

    hf_name: str | None
    src_row: int
    src_col: int
    dst_row: int
    dst_col: int
    rows: int
    cols: int


@dataclass(frozen=True)
class GlobalParam:
    """A parameter of the whole model before any cut.

    `sections` are row counts that add up to the rows; under `cut` "rows" each section is cut on its own and a rank
    holds its parts one below the other. `replica` marks a second home of tensors that live in another parameter too.
    """

    name: str  # canonical
    shape: tuple[int, ...]
    blocks: tuple[Block, ...]
    cut: Literal["none", "rows", "cols"]
    sections: tuple[int, ...]
    replica: bool = False
    optional: bool = False


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """(rows, columns) of a tensor seen as a matrix: the last dimension is the columns, a vector is one column."""
    return (shape[0], 1) if len(shape) == 1 else (prod(shape[:-1]), shape[-1])


def source_shape(source: Source, hf: HFConfig) -> tuple[int, ...]:
    dims = hf.dims
    """Sizes of a source tensor."""
    return tuple(dims[symbol] for symbol in source.shape)


def global_param(rule: Rule, hf: HFConfig, *, padded_vocab: int, layer: int = 0, replica: bool = False) -> GlobalParam:
    """A rule's parameter for one layer: primitive by primitive, the only place that knows how tensors are stacked."""
    names = [source.name.format(layer=layer) for source in rule.sources]
    shapes = [source_shape(source, hf) for source in rule.sources]
    rows = [matrix_shape(shape)[0] for shape in shapes]
    cut: Literal["none", "rows", "cols"] = "rows"
    sections: tuple[int, ...] = (sum(rows),)
    if rule.primitive == "vocab":
        blocks = [Block(names[0], 0, 0, rows[0])]
        if padded_vocab > rows[0]:
            blocks.append(Block(None, rows[0], 0, padded_vocab - rows[0]))
        sections = (padded_vocab,)
    elif rule.primitive == "qkv":
        blocks = list(_interleaved(names, hf.num_kv_heads, [r // hf.num_kv_heads for r in rows]))
    elif rule.primitive == "gated":
        blocks = [Block(names[0], 0, 0, rows[0]), Block(names[1], rows[0], 0, rows[1])]
        sections = tuple(rows)
    else:
        blocks = [Block(names[0], 0, 0, rows[0])]
        if rule.primitive != "col":
            cut = "cols" if rule.primitive == "row" else "none"
    shape = (sum(sections), *shapes[0][1:])
    name = rule.param.format(layer=layer)
    return GlobalParam(name, shape, tuple(blocks), cut, sections, replica, rule.optional)


def _interleaved(names: list[str], groups: int, rows: list[int]) -> Iterator[Block]:
    """Group by group, `rows[i]` rows of tensor i: the row order of Megatron-Core's fused query, key and value."""
    at = 0
    for group in range(groups):
        for name, count in zip(names, rows, strict=True):
            yield Block(name, at, group * count, count)
            at += count


def shard(param: GlobalParam, tp: int, tp_rank: int) -> tuple[tuple[int, ...], tuple[Copy, ...]]:
    """Shape and copies of one rank's part of a parameter."""
    num_cols = matrix_shape(param.shape)[1]
    if param.cut != "rows":
        parts = tp if param.cut == "cols" else 1
        width = num_cols // parts
        left = width * tp_rank if param.cut == "cols" else 0
        copies = tuple(Copy(b.hf_name, b.src_row, left, b.dst_row, 0, b.rows, width) for b in param.blocks)
        return (*param.shape[:-1], width) if len(param.shape) > 1 else param.shape, copies
    found, start, at = [], 0, 0
    for section in param.sections:
        part = section // tp
        low = start + tp_rank * part
        inside = (b for b in param.blocks if b.dst_row < low + part and b.dst_row + b.rows > low)
        found += [_row_copy(b, low, low + part, at - low, num_cols) for b in inside]
        start, at = start + section, at + part
    return (at, *param.shape[1:]), tuple(found)


def _row_copy(block: Block, low: int, high: int, shift: int, cols: int) -> Copy:
    """The part of a block within rows [low, high) of the parameter, moved by `shift` into the shard."""
    first, last = max(block.dst_row, low), min(block.dst_row + block.rows, high)
    return Copy(block.hf_name, block.src_row + first - block.dst_row, 0, first + shift, 0, last - first, cols)
