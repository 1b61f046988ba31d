"""Reading pieces into any memory, and whether pieces make up a tensor. Damage is in test_damage.py."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mega_rl.checkpoint.format import reader
from mega_rl.checkpoint.format.reader import Checkpoint, PieceCopy, StoredPiece
from mega_rl.checkpoint.format.shards import (
    PieceSpec,
    checksum,
    coverage_fault,
    is_inside,
    order,
    overlap,
    write_shard,
)
from mega_rl.converters.safetensors.reader import DTYPES, read_header
from mega_rl.parallel.boxes import Box, whole
from tests.unit_tests.checkpoint import written


def stored(tmp_path: Path, tensor: Tensor, dtype: str) -> tuple[Checkpoint, StoredPiece]:
    """One tensor as the only piece of a shard."""
    spec = PieceSpec("a", dtype, (0,) * tensor.dim(), tuple(tensor.shape))
    other = PieceSpec("before", "F64", (0,), (3,))
    path = tmp_path / "shard_00000.safetensors"
    path.unlink(missing_ok=True)
    data = [written.data_of(torch.zeros(3, dtype=torch.float64)), written.data_of(tensor)]
    write_shard(path, [other, spec], [data[i] for i in order([other, spec])])
    manifest = written.manifest_of(1, {}, [])
    offset = read_header(path)[spec.key].offset
    return Checkpoint(tmp_path, manifest, {}), StoredPiece(spec, path, offset, checksum(data[1]))


def boxes(shape: tuple[int, ...]) -> Iterator[Box]:
    """Some boxes of every kind: whole, cut in any dimension, empty."""
    choose = random.Random(str(shape))
    yield whole(shape)
    for _ in range(12):
        low = tuple(choose.randrange(n) if n else 0 for n in shape)
        yield Box(
            low,
            tuple(
                choose.randint(0 if i else 1, n - o) if n else 0
                for i, (o, n) in enumerate(zip(low, shape, strict=True))
            ),
        )
    for dims in itertools.combinations(range(len(shape)), max(0, len(shape) - 1)):
        low = tuple(choose.randrange(n) if i in dims and n else 0 for i, n in enumerate(shape))
        yield Box(low, tuple(n - o for o, n in zip(low, shape, strict=True)))


@pytest.mark.parametrize("dtype", ["F32", "BF16", "I64", "U8", "BOOL", "F8_E4M3", "C64"])
@pytest.mark.parametrize("shape", [(), (1,), (11,), (5, 7), (3, 4, 5), (2, 3, 1, 4), (2, 3, 2, 3, 2), (0, 3)])
@pytest.mark.parametrize("buffer", [8, 1 << 20])
def test_every_box_into_every_memory(
    dtype: str, shape: tuple[int, ...], buffer: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_BUFFER_BYTES", buffer)
    tensor = torch.randint(0, 2, (*shape, DTYPES[dtype].itemsize), dtype=torch.uint8)
    tensor = tensor.view(DTYPES[dtype]).view(shape)
    checkpoint, piece = stored(tmp_path, tensor, dtype)
    for box in boxes(shape):
        expected = written.cut(tensor, box)
        into = [torch.zeros(box.shape, dtype=tensor.dtype)]
        if box.shape:
            # Strides of another order, with gaps, and every second element.
            into.append(torch.zeros(box.shape[::-1], dtype=tensor.dtype).permute(*reversed(range(len(box.shape)))))
            wide = torch.zeros(*(2 * n for n in box.shape), dtype=tensor.dtype)
            into.append(wide[tuple(slice(None, n) for n in box.shape)])
            into.append(wide.clone()[tuple(slice(None, None, 2) for _ in box.shape)])
        for target in into:
            checkpoint.read([PieceCopy(piece, box, target)])
            assert same(target, expected), (box, target.stride())


def same(first: Tensor, second: Tensor) -> bool:
    return bytes(written.data_of(first)) == bytes(written.data_of(second))


def spec_of(box: Box) -> PieceSpec:
    return PieceSpec("a", "F32", *box)


def random_cuts(choose: random.Random, shape: tuple[int, ...], depth: int) -> list[Box]:
    """A tensor cut in two again and again, at random."""
    result = [whole(shape)]
    for _ in range(depth):
        box = result.pop(choose.randrange(len(result)))
        dim = choose.randrange(len(shape))
        if box.shape[dim] < 2:
            result.append(box)
            continue
        at = choose.randrange(1, box.shape[dim])
        rest = tuple(o + at if d == dim else o for d, o in enumerate(box.offset))
        result.append(Box(box.offset, tuple(at if d == dim else n for d, n in enumerate(box.shape))))
        result.append(Box(rest, tuple(n - at if d == dim else n for d, n in enumerate(box.shape))))
    return result


@pytest.mark.parametrize("seed", range(30))
def test_coverage_is_that_of_counting_every_element(seed: int) -> None:
    choose = random.Random(seed)
    shape = tuple(choose.randint(1, 9) for _ in range(choose.randint(1, 4)))
    cuts = random_cuts(choose, shape, choose.randint(0, 40))
    choose.shuffle(cuts)
    if seed % 3 == 1:  # one moved or made larger
        box = cuts.pop()
        cuts.append(Box(tuple(choose.randrange(n) for n in shape), tuple(choose.randint(1, n) for n in box.shape)))
    if seed % 3 == 2:
        cuts.append(choose.choice(cuts))
    inside = [is_inside(spec_of(box), shape) for box in cuts]
    counts = torch.zeros(shape, dtype=torch.int64)
    for box in cuts:
        written.cut(counts, box).add_(1)
    pair = overlap([spec_of(box) for box in cuts])
    assert (pair is None) == (int(counts.max()) <= 1 if all(inside) else pair is None)
    if pair is not None:
        first, second = torch.zeros(shape), torch.zeros(shape)
        written.cut(first, Box(*pair[0][2:])).add_(1)
        written.cut(second, Box(*pair[1][2:])).add_(1)
        assert (first * second).any() or not all(inside)
    if seed % 3 == 0:
        assert pair is None
        assert coverage_fault([spec_of(box) for box in cuts], shape) == ""
