"""Quantised matrices of checkpoints, presented as one bfloat16 tensor `X` each and decoded rectangle by rectangle.

| kind | tensors on disk | value |
|---|---|---|
| fp8 | `X` F8_E4M3 [R, C], `X_scale_inv` with one scale per block, or one in all | stored * scale |
| mxfp4 | `X_blocks` U8 [E, F, H / 32, 16], `X_scales` U8 [E, F, H / 32]; X is [E, H, F] | table * 2^(scale - 127) |
| int4 | `X_packed` I32 [R, C / 8], `X_scale` [R, C / group], `X_shape` | (4 bits - 8) * scale |
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from mega_rl.errors import UserErrors

if TYPE_CHECKING:
    from mega_rl.converters.safetensors.reader import TensorInfo

Span: TypeAlias = tuple[int, int]  # low, high
Read: TypeAlias = Callable[["TensorInfo", Span, Span], Tensor]  # a rectangle of a stored matrix

SCALE_SUFFIX = "_scale_inv"
MXFP4_GROUP = 32  # values that share a scale, in 16 bytes
INT4_PER_WORD = 8
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# Bytes that decoding holds at a time for each decoded value, at most: 64-bit indices into the table, two floats.
BYTES_PER_VALUE = 24
_ROWS = 4096  # rows of a matrix that are quantised at a time
_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float8_e8m0fnu)


class Packed(NamedTuple):
    """The stored tensors of a decoded one, both as matrices."""

    kind: Literal["fp8", "mxfp4", "int4"]
    values: TensorInfo
    scales: TensorInfo
    block: tuple[int, int]  # rows and columns of the decoded matrix that share a scale; of mxfp4 before transposing
    width: int = 0  # mxfp4: columns of the decoded tensor


def block_size(root: Path) -> tuple[int, int] | None:
    """Return the block of 8-bit matrices by config.json; None: one scale per matrix."""
    try:
        config = json.loads((root / "config.json").read_bytes())
        text = config.get("text_config") or {}
        given = config.get("quantization_config") or text.get("quantization_config") or {}
        size = given.get("weight_block_size", (128, 128))
        return None if size is None else (max(int(size[0]), 1), max(int(size[1]), 1))
    except (OSError, ValueError, AttributeError, TypeError, LookupError):
        return 128, 128  # a wrong config.json is refused where the model is read


def pair(tensors: dict[str, TensorInfo], block: tuple[int, int] | None) -> dict[str, TensorInfo]:
    """Return the tensors, each quantised matrix and its scales merged into one bfloat16 tensor.

    block: of 8-bit matrices. Raises UserErrors for scales that do not fit their matrix.
    """
    problems: list[str] = []
    merge: Mapping[str, Any] = {SCALE_SUFFIX: _fp8, "_blocks": _mxfp4, "_packed": _int4}
    for name in list(tensors):
        suffix = next((suffix for suffix in merge if name.endswith(suffix)), None)
        if suffix is not None and name in tensors:
            merge[suffix](tensors, name.removesuffix(suffix), block, problems)
    if problems:
        raise UserErrors(problems)
    return tensors


def _fp8(tensors: dict[str, TensorInfo], name: str, block: tuple[int, int] | None, problems: list[str]) -> None:
    weight, scale = tensors.get(name), tensors[name + SCALE_SUFFIX]
    if weight is None or weight.dtype != torch.float8_e4m3fn or weight.packed:
        return  # not scales of such a matrix: the check against the model's tensors reports it
    high, wide = weight.shape if block is None and len(weight.shape) == 2 else block or (1, 1)
    expected = tuple(-(-size // by) for size, by in zip(weight.shape, (high, wide), strict=False))
    fits = scale.shape == expected or (block is None and scale.shape in ((), (1,)))
    if len(weight.shape) != 2 or not fits or scale.dtype not in _SCALE_DTYPES:
        rule = f"must be F32, BF16 or F8_E8M0 {list(expected)}, one scale per block of {high} x {wide}"
        problems.append(_misfit(scale, weight, rule))
        return
    del tensors[scale.name]
    tensors.pop(name.removesuffix("weight") + "activation_scale", None)  # activations are not quantised here
    grid = scale._replace(shape=expected)
    tensors[name] = weight._replace(dtype=torch.bfloat16, packed=Packed("fp8", weight, grid, (high, wide)))


def _mxfp4(tensors: dict[str, TensorInfo], name: str, block: object, problems: list[str]) -> None:
    blocks, scales = tensors[name + "_blocks"], tensors.get(name + "_scales")
    if scales is None or blocks.dtype != torch.uint8:
        return
    if len(blocks.shape) != 4 or blocks.shape[3] * 2 != MXFP4_GROUP or scales.shape != blocks.shape[:3]:
        problems.append(_misfit(scales, blocks, f"must be U8 {list(blocks.shape[:3])}, one for each 16 bytes"))
        return
    experts, rows, groups, _ = blocks.shape
    values = blocks._replace(shape=(experts * rows, groups * MXFP4_GROUP // 2))
    packed = Packed("mxfp4", values, scales._replace(shape=(experts * rows, groups)), (1, MXFP4_GROUP), rows)
    del tensors[blocks.name], tensors[scales.name]
    shape = (experts, groups * MXFP4_GROUP, rows)
    tensors[name] = blocks._replace(name=name, dtype=torch.bfloat16, shape=shape, packed=packed)


def _int4(tensors: dict[str, TensorInfo], name: str, block: object, problems: list[str]) -> None:
    words, scale = tensors[name + "_packed"], tensors.get(name + "_scale")
    if scale is None or words.dtype != torch.int32 or len(words.shape) != 2:
        return
    rows, columns = words.shape[0], words.shape[1] * INT4_PER_WORD
    groups = scale.shape[1] if len(scale.shape) == 2 else 0
    if not groups or scale.shape[0] != rows or columns % groups or scale.dtype not in _SCALE_DTYPES[:2]:
        problems.append(_misfit(scale, words, f"must be F32 or BF16 [{rows}, groups], groups a divisor of {columns}"))
        return
    del tensors[words.name], tensors[scale.name]
    tensors.pop(name + "_shape", None)
    packed = Packed("int4", words, scale, (1, columns // groups))
    tensors[name] = words._replace(name=name, dtype=torch.bfloat16, shape=(rows, columns), packed=packed)


def _misfit(scale: TensorInfo, weight: TensorInfo, rule: str) -> str:
    actual = f"{scale.name} is {str(scale.dtype).removeprefix('torch.')} {list(scale.shape)}"
    return f"{scale.file}: {actual}; for {weight.name} {list(weight.shape)} it {rule}"


def decode(packed: Packed, rows: Span, cols: Span, read: Read) -> Tensor:
    """Return a rectangle of the decoded matrix, [rows, columns] bfloat16; `read` gives those of stored matrices."""
    if packed.kind != "mxfp4":
        return _decode_matrix(packed, rows, cols, read).to(torch.bfloat16)
    height = packed.scales.shape[1] * MXFP4_GROUP  # rows of an expert
    parts = []
    for expert in range(rows[0] // height, -(-rows[1] // height)):
        low, high = max(rows[0] - expert * height, 0), min(rows[1] - expert * height, height)
        across = (expert * packed.width + cols[0], expert * packed.width + cols[1])
        parts.append(_decode_matrix(packed, across, (low, high), read).T)
    return torch.cat(parts).to(torch.bfloat16)


def _decode_matrix(packed: Packed, rows: Span, cols: Span, read: Read) -> Tensor:
    """Return a rectangle of a matrix as it is stored, before any transposition and rounding."""
    high, wide = packed.block
    first, left = rows[0] // high, cols[0] // wide
    scale = read(packed.scales, (first, -(-rows[1] // high)), (left, -(-cols[1] // wide)))
    of_row, of_col = torch.arange(*rows) // high - first, torch.arange(*cols) // wide - left
    scale = scale[of_row][:, of_col]
    if packed.kind == "fp8":
        return read(packed.values, rows, cols).float() * scale.float()
    per_item = INT4_PER_WORD if packed.kind == "int4" else 2
    start = cols[0] // per_item
    stored = read(packed.values, rows, (start, -(-cols[1] // per_item)))
    nibbles = (stored[..., None] >> torch.arange(0, 4 * per_item, 4, dtype=stored.dtype)) & 15
    wanted = nibbles.flatten(1)[:, cols[0] - start * per_item : cols[1] - start * per_item]
    if packed.kind == "int4":
        return (wanted - 8).float() * scale.float()
    values = torch.tensor(FP4_VALUES, dtype=torch.bfloat16)[wanted.long()]
    return torch.ldexp(values, scale.to(torch.int32) - 127)


def quantisation_loss(packed: Packed, tensor: Tensor) -> float:
    """Return |Q(X) - X| / |X| of a decoded tensor X; Q is its source's format, with new scales."""
    high, wide = packed.block
    rows = max(high, _ROWS // high * high)
    lost = whole = 0.0
    for matrix in tensor.transpose(1, 2) if packed.kind == "mxfp4" else tensor.split(rows):
        padded = pad(matrix.float(), (0, -matrix.shape[1] % wide, 0, -matrix.shape[0] % high))
        blocks = padded.unflatten(1, (-1, wide)).unflatten(0, (-1, high))  # [R / high, high, C / wide, wide]
        lost += float((_quantised(packed, blocks) - blocks).square().sum())
        whole += float(blocks.square().sum())
    return (lost / whole) ** 0.5 if whole else 0.0


def _quantised(packed: Packed, blocks: Tensor) -> Tensor:
    """Return the quantised values; each block (dimensions 1 and 3) is scaled by its largest."""
    least, most, small = blocks.amin((1, 3), keepdim=True), blocks.amax((1, 3), keepdim=True), 1e-30
    if packed.kind == "int4":
        scale = torch.maximum(most / 7, least / -8).clamp(min=small).to(packed.scales.dtype).float()
        return (blocks / scale).round().clamp(-8, 7) * scale
    largest = torch.maximum(most, -least).clamp(min=small)
    if packed.kind == "fp8":
        scale = largest / torch.finfo(torch.float8_e4m3fn).max
        if packed.scales.dtype == torch.float8_e8m0fnu:  # a power of two, rounded up
            fraction, exponent = torch.frexp(scale)
            scale = torch.ldexp(torch.ones_like(scale), exponent - (fraction == 0.5).int())
        return (blocks / scale).to(torch.float8_e4m3fn).float() * scale
    scale = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - 3)  # the largest one becomes 4 to 8
    levels = blocks.new_tensor(FP4_VALUES[:8])
    nearest = levels[torch.bucketize((blocks / scale).abs(), (levels[1:] + levels[:-1]) / 2)]
    return nearest * blocks.sign() * scale
