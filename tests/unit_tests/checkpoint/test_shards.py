"""Shards: what is written is read again, by others too, and every byte has a checksum."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors import safe_open
from torch import Tensor

from mega_rl.checkpoint.format import shards
from mega_rl.checkpoint.format.shards import PieceSpec, ShardRecord, order, write_shard
from mega_rl.errors import UserErrors
from mega_rl.storage.disk import SaveError
from mega_rl.storage.safetensors_header import ITEM_BYTES
from mega_rl.storage.safetensors_reader import DTYPE_NAMES, DTYPES, read_header
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


def test_item_sizes_are_those_of_torch() -> None:
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == ITEM_BYTES


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
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


def test_a_shard_without_pieces(tmp_path: Path) -> None:
    record = write_shard(tmp_path / "shard_00000.safetensors", [], [])
    assert read_header(tmp_path / "shard_00000.safetensors") == {}
    assert record.nbytes == (tmp_path / "shard_00000.safetensors").stat().st_size


def test_a_view_may_be_reused_for_the_next_piece(tmp_path: Path) -> None:
    specs = [PieceSpec("a", "U8", (i,), (1,)) for i in range(5)]
    buffer = bytearray(1)

    def data() -> Iterator[memoryview]:
        for i in range(5):
            buffer[0] = i
            yield memoryview(buffer)

    path = tmp_path / "shard_00000.safetensors"
    write_shard(path, specs, data())
    assert path.read_bytes()[-5:] == bytes(range(5))


def test_mistakes_of_the_caller(tmp_path: Path) -> None:
    spec = PieceSpec("a", "F32", (0,), (2,))
    with pytest.raises(AssertionError):
        write_shard(tmp_path / "size", [spec], [memoryview(bytes(7))])
    with pytest.raises(AssertionError, match="twice"):
        write_shard(tmp_path / "twice", [spec, spec], [memoryview(bytes(8))] * 2)
    with pytest.raises(ValueError, match="shorter"):
        write_shard(tmp_path / "few", [spec], [])
    with pytest.raises(SaveError, match="exists"):
        write_shard(tmp_path / "size", [], [])


def test_records_through_json() -> None:
    record = ShardRecord("shard_00012.safetensors", 100, "0123456789abcdef")
    assert ShardRecord.from_json(json.loads(json.dumps(record.to_json())), "x") == record
    with pytest.raises(UserErrors, match=r"x: file='../shard_00012.safetensors' must be") as caught:
        ShardRecord.from_json({"file": "../shard_00012.safetensors", "bytes": 1, "header": "0"}, "x")
    assert len(caught.value.problems) == 3
    assert all(DTYPE_NAMES[DTYPES[name]] == name for name in ITEM_BYTES)


def test_the_writing_side_imports_no_torch() -> None:
    """The process that writes in the background starts anew in every run."""
    code = (
        "import sys\nfrom mega_rl.checkpoint import folders, maintenance\n"
        "from mega_rl.checkpoint.format import manifest, shards\n"
        "from mega_rl.checkpoint.saving import writer\n"
        "from mega_rl.storage import disk\nprint('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "False"]
