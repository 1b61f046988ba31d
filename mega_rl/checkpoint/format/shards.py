"""Shards: safetensors files of pieces of tensors, each with a checksum.

A piece's key is `NAME@o0,o1,...`: the whole tensor's name and where in it the piece begins. The header's `__metadata__`
holds the checksum of each piece's bytes. Checksums are all of one width, so the header's length is known before the
data is: the data is written first and hashed on the way, the header last.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from mega_rl import disk
from mega_rl.converters.safetensors.header import ITEM_BYTES, METADATA, encode_header
from mega_rl.errors import UserError
from mega_rl.untrusted import is_checksum, is_count, shown

FORMAT = "mega_rl shard 1"
CHUNK_BYTES = 1 << 20  # hashed and then copied by the kernel while the caches hold it
SHARD_NAME = re.compile(r"shard_[0-9]{5,9}\.safetensors")


class PieceSpec(NamedTuple):
    """A box of elements of a tensor, as it is stored.

    Offset and shape are those of a `mega_rl.parallel.boxes.Box`, which needs torch; `list` runs without it.
    """

    name: str  # name of the whole tensor
    dtype: str  # "F32", "BF16", as in safetensors headers
    offset: tuple[int, ...]  # the piece's beginning in the whole tensor
    shape: tuple[int, ...]  # shape of the piece

    @property
    def nbytes(self) -> int:
        """Return the bytes that the piece takes in the file."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def key(self) -> str:
        """Return the tensor's name in the shard."""
        return f"{self.name}@{','.join(map(str, self.offset))}"


class ShardRecord(NamedTuple):
    """A shard's file name, size and header checksum, as the manifest lists them."""

    file: str
    nbytes: int
    header: str  # checksum of the header's length and text

    def to_json(self) -> dict[str, Any]:
        """Return the entry of the manifest."""
        return {"file": self.file, "bytes": self.nbytes, "header": self.header}

    @classmethod
    def from_json(cls, raw: Any, where: str | Path) -> ShardRecord:
        """Parse an entry of the manifest. Raises UserError."""
        match raw:
            case {"file": str(file), "bytes": nbytes, "header": header} if len(raw) == 3 and SHARD_NAME.fullmatch(file):
                if is_count(nbytes, 8) and is_checksum(header):
                    return cls(file, nbytes, header)
        raise UserError(f"{where}={shown(raw)} must have the name of a shard, its bytes and its header's checksum")


def shard_name(rank: int) -> str:
    """Return the file name of the shard that a global rank writes."""
    return f"shard_{rank:05d}.safetensors"


def checksum(data: bytes | bytearray | memoryview) -> str:
    """Return xxh3_64 as 16 hexadecimal digits."""
    return str(xxhash.xxh3_64_hexdigest(data))


def order(specs: Sequence[PieceSpec]) -> list[int]:
    """Return the positions of the pieces in file order: wide items first, for alignment."""
    return sorted(range(len(specs)), key=lambda i: -ITEM_BYTES[specs[i].dtype])


def write_shard(path: Path, specs: Sequence[PieceSpec], data: Iterable[memoryview]) -> ShardRecord:
    """Write a new shard durably, except for its name; goes through the data once.

    `data` gives the bytes of each piece (flat, format "B") in the order of `order(specs)`; a view may be reused once
    the next one is requested. Raises SaveError for an error of the disk; a partial file then stays.
    """
    placed = [specs[i] for i in order(specs)]
    checksums = ["0" * 16] * len(placed)
    start = at = len(_header(placed, checksums))
    fd = disk.open_new(path)
    try:
        for i, (spec, view) in enumerate(zip(placed, data, strict=True)):
            assert (view.format, view.shape) == ("B", (spec.nbytes,)), (spec, view.format, view.shape)
            running = xxhash.xxh3_64()
            for low in range(0, len(view), CHUNK_BYTES):
                chunk = view[low : low + CHUNK_BYTES]
                running.update(chunk)
                disk.write_at(fd, at, [chunk])
                at += len(chunk)
            checksums[i] = running.hexdigest()
        header = _header(placed, checksums)
        assert len(header) == start, "the header's length depends on the checksums"
        disk.write_at(fd, 0, [memoryview(header)])
        disk.sync(fd)
    finally:
        os.close(fd)
    return ShardRecord(path.name, at, checksum(header))


def _header(placed: Sequence[PieceSpec], checksums: Sequence[str]) -> bytes:
    """Return length and text of the header; `placed` in file order."""
    keys = [spec.key for spec in placed]
    assert len(set(keys)) == len(keys), f"written twice: {sorted({key for key in keys if keys.count(key) > 1})}"
    sums = json.dumps(dict(zip(keys, checksums, strict=True)), separators=(",", ":"))
    entries: dict[str, Mapping[str, Any]] = {METADATA: {"format": FORMAT, "checksums": sums}}
    at = 0
    for key, spec in zip(keys, placed, strict=True):
        end = at + spec.nbytes
        entries[key] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [at, end]}
        at = end
    return encode_header(entries)


def is_inside(piece: PieceSpec, shape: tuple[int, ...]) -> bool:
    """Return whether a piece is a box within a tensor of this shape."""
    return len(piece.offset) == len(piece.shape) == len(shape) and all(
        o + n <= size for o, n, size in zip(piece.offset, piece.shape, shape, strict=True)
    )


def coverage_fault(pieces: Sequence[PieceSpec], shape: tuple[int, ...]) -> str:
    """Return why pieces do not hold each of a tensor's elements exactly once, "" if they do."""
    if (pair := overlap(pieces)) is not None:
        at = " and ".join(f"{list(piece.shape)} at {list(piece.offset)}" for piece in pair)
        return f"its pieces {at} overlap"
    missing = prod(shape) - sum(prod(piece.shape) for piece in pieces)
    return f"its pieces lack {missing} of {prod(shape)} elements" if missing else ""


def overlap(pieces: Sequence[PieceSpec]) -> tuple[PieceSpec, PieceSpec] | None:
    """Return two pieces that share an element, or None, by a sweep along the first dimension."""
    active: list[PieceSpec] = []
    for piece in sorted((piece for piece in pieces if prod(piece.shape)), key=lambda piece: piece.offset[:1]):
        active = [a for a in active if not a.shape or a.offset[0] + a.shape[0] > piece.offset[0]]
        for other in active:
            if all(
                max(o, a) < min(o + n, a + m)
                for o, n, a, m in zip(piece.offset, piece.shape, other.offset, other.shape, strict=True)
            ):
                return other, piece
        active.append(piece)
    return None
