"""Shards: what is written is read again, by others too, and every byte has a checksum."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import torch
import xxhash
from safetensors import safe_open
from torch import Tensor

from mega_rl.checkpoint.format import shards
from mega_rl.checkpoint.format.shards import PieceSpec, ShardRecord, order, write_shard
from mega_rl.converters.safetensors.reader import DTYPES, read_header
from tests.unit_tests.checkpoint.written import data_of


def pieces() -> list[tuple[PieceSpec, Tensor]]:
    """One piece of every dtype, sizes that are no multiples of 8, and one of two chunks."""
    result = []
    for i, (name, dtype) in enumerate(DTYPES.items()):
        tensor = torch.arange(3 * (2 * i + 1), dtype=torch.uint8).repeat_interleave(dtype.itemsize)
        result.append((PieceSpec(f"a/{name}", name, (i, 0), (3, 2 * i + 1)), tensor.view(dtype).view(3, -1)))
    large = torch.randn(shards.CHUNK_BYTES // 4 + 5, generator=torch.Generator().manual_seed(0))
    return [
        *result,
        (PieceSpec("b", "F32", (0,), tuple(large.shape)), large),
        (PieceSpec("c", "I64", (), ()), torch.tensor(5)),
    ]


def write(path: Path) -> ShardRecord:
    parts = pieces()
    specs = [spec for spec, _ in parts]
    return write_shard(path, specs, (data_of(parts[i][1]) for i in order(specs)))


def test_written_files_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "shard_00003.safetensors"
    record = write(path)
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    assert record == ShardRecord(path.name, len(content), xxhash.xxh3_64_hexdigest(content[: 8 + length]))
    assert length % 8 == 0
    sums = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["checksums"])
    infos = read_header(path)
    assert set(sums) == set(infos) == {spec.key for spec, _ in pieces()}
    for spec, tensor in pieces():
        info = infos[spec.key]
        assert (info.dtype, info.shape, info.nbytes) == (tensor.dtype, spec.shape, spec.nbytes)
        assert info.offset % tensor.dtype.itemsize == 0
        actual = content[info.offset : info.offset + info.nbytes]
        assert actual == bytes(data_of(tensor))
        assert sums[spec.key] == xxhash.xxh3_64_hexdigest(actual)


def test_the_library_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "shard_00000.safetensors"
    write(path)
    with safe_open(path, "pt") as file:
        assert file.metadata()["format"] == shards.FORMAT
        for spec, tensor in pieces():
            actual = file.get_tensor(spec.key)
            assert actual.dtype == tensor.dtype
            assert bytes(data_of(actual)) == bytes(data_of(tensor))
