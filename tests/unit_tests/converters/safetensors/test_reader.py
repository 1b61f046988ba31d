"""Our safetensors reader and writer against the library's, and against damaged files."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mega_rl.converters.safetensors.header import INDEX_FILE, MAX_HEADER_BYTES
from mega_rl.converters.safetensors.reader import CheckpointReader
from mega_rl.converters.safetensors.writer import write_checkpoint
from mega_rl.errors import UserError, UserErrors


def tensors_of_every_type() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(5, 6, generator=generator)
    return {
        "bf16": values.bfloat16(),
        "f32": values[0].clone(),
        "f16": values[:3].half(),
        "f64": values.double(),
        "i64": torch.arange(7),
        "bool": torch.tensor([True, False, True]),
        "fp8": values.to(torch.float8_e4m3fn),
        "cube": torch.randn(2, 3, 4, generator=generator),
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 4),
    }


def same(a: Tensor, b: Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    )


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    expected = tensors_of_every_type()
    save_file(expected, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with CheckpointReader(tmp_path) as reader:
        assert reader.tensors.keys() == expected.keys()
        assert all(same(reader.read(name), expected[name]) for name in expected)
        assert reader.bytes_read == sum(t.nbytes for t in expected.values())


@pytest.mark.parametrize("shard_bytes", [1, 100, 1 << 20])
def test_the_library_reads_what_we_write(tmp_path: Path, shard_bytes: int) -> None:
    expected = tensors_of_every_type()
    out = write_checkpoint(tmp_path / "out", expected.items(), shard_bytes=shard_bytes)
    files = sorted(out.glob("*.safetensors"))
    actual = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert actual.keys() == expected.keys()
    assert all(same(actual[name], expected[name]) for name in expected)
    if len(files) == 1:
        assert [f.name for f in out.iterdir()] == ["model.safetensors"]
    else:
        index = json.loads((out / INDEX_FILE).read_text())
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in expected.values())
        assert {out / name for name in index["weight_map"].values()} == set(files)
        assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    with CheckpointReader(out) as reader:
        assert all(same(reader.read(name), expected[name]) for name in expected)


def test_rows_and_columns(tmp_path: Path) -> None:
    table = torch.arange(60, dtype=torch.float32).view(10, 6)
    save_file({"t": table, "v": table[:, 0].clone(), "c": table.view(2, 5, 6).clone()}, tmp_path / "m.safetensors")
    with CheckpointReader(tmp_path / "m.safetensors") as reader:
        assert torch.equal(reader.read_block("t", (3, 7), (0, 6)), table[3:7])
        assert reader.bytes_read == 4 * 6 * 4
        assert torch.equal(reader.read_block("t", (2, 9), (1, 3)), table[2:9, 1:3])
        assert reader.bytes_read == (4 * 6 + 7 * 2) * 4
        assert torch.equal(reader.read_block("v", (1, 4), (0, 1)), table[1:4, :1])
        assert torch.equal(reader.read_block("c", (4, 6), (0, 6)), table[4:6])


def test_columns_are_cut_in_bounded_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mega_rl.converters.safetensors.reader._WINDOW_BYTES", 50)
    table = torch.arange(60, dtype=torch.float32).view(10, 6)
    save_file({"t": table}, tmp_path / "model.safetensors")
    with CheckpointReader(tmp_path) as reader:
        assert torch.equal(reader.read_block("t", (1, 10), (2, 5)), table[1:10, 2:5])


# Damage. Each case edits the header or the bytes of a good file and names what the message must hold.


def rewrite(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Applies `edit` to the header, leaving the data as it is."""
    blob = path.read_bytes()
    length = struct.unpack("<Q", blob[:8])[0]
    header = json.loads(blob[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + blob[8 + length :])


def set_in(name: str, key: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda header: header[name].__setitem__(key, value)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(4, 2), "b": torch.zeros(3)}, path)
    return path


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (set_in("a", "dtype", "Q4"), ["a: dtype='Q4'"]),
        (set_in("a", "dtype", 7), ["a: dtype=7"]),
        (set_in("a", "shape", [4, 3]), ["a: 32 bytes", "[4, 3]", "48"]),
        (set_in("a", "shape", [3, 2]), ["a: 32 bytes", "[3, 2]", "24"]),
        (set_in("a", "shape", [-4, -2]), ["a: shape=[-4, -2]"]),
        (set_in("a", "shape", "4x2"), ["a: shape='4x2'"]),
        (set_in("a", "shape", [True, 8]), ["a: shape=[True, 8]"]),
        (set_in("a", "data_offsets", [0]), ["a: data_offsets=[0]"]),
        (set_in("a", "data_offsets", [32, 0]), ["a: data_offsets=[32, 0]"]),
        (set_in("a", "data_offsets", None), ["a: data_offsets=None"]),
        (set_in("b", "data_offsets", [16, 28]), ["b overlaps a"]),
        (set_in("b", "data_offsets", [36, 48]), ["b leaves a gap after a"]),
        (set_in("b", "data_offsets", [1 << 60, (1 << 60) + 12]), ["b leaves a gap after a"]),
        (lambda header: header.update(b=3), ["b: is a JSON int"]),
        (lambda header: header.pop("b"), ["12 bytes follow the last tensor"]),
        (lambda header: header["b"].update(shape=[30], data_offsets=[32, 152]), ["truncated"]),
        (lambda header: header.update({"\x1b[2J": header.pop("b")}), ["'\\x1b[2J': a name must be printable"]),
        (lambda header: header.update({"x" * 10**6: header.pop("b")}), [f": {'x' * 80}...: a name must be"]),
    ],
)
def test_damaged_header(file: Path, edit: Callable[[dict[str, Any]], object], words: list[str]) -> None:
    rewrite(file, edit)
    with pytest.raises(UserErrors) as caught:
        CheckpointReader(file)
    for word in [str(file), *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("blob", "message"),
    [
        (b"", "not a safetensors file"),
        (b"\x05\0\0", "not a safetensors file"),
        (struct.pack("<Q", 100) + b"{}", "truncated"),
        (struct.pack("<Q", MAX_HEADER_BYTES + 1), "not a safetensors file"),
        (struct.pack("<Q", 2) + b"{x", "not valid JSON"),
        (struct.pack("<Q", 2) + b"[]", "must be an object"),
        (struct.pack("<Q", 2) + b"\xff\xfe", "not valid JSON"),
        (struct.pack("<Q", 15) + b'{"a":{},"a":{}}', "a key occurs twice"),
        (struct.pack("<Q", 90000) + b"[" * 90000, "not valid JSON"),
    ],
)
def test_not_this_format(tmp_path: Path, blob: bytes, message: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(blob)
    with pytest.raises(UserError, match=message) as caught:
        CheckpointReader(tmp_path)
    assert str(tmp_path / "model.safetensors") in str(caught.value)


def test_truncated_at_every_length(file: Path) -> None:
    blob = file.read_bytes()
    for length in range(len(blob)):
        file.write_bytes(blob[:length])
        with pytest.raises(
            UserError, match=rf"{file}: (truncated, {length} bytes|{length} bytes are not a safetensors)"
        ):
            CheckpointReader(file)


def test_truncated_after_it_was_opened(file: Path) -> None:
    with CheckpointReader(file) as reader:
        file.write_bytes(file.read_bytes()[:-16])
        with pytest.raises(UserError, match="ends inside"):
            reader.read("b" if reader.tensors["b"].offset > reader.tensors["a"].offset else "a")


def sharded(root: Path) -> Path:
    save_file({"a": torch.ones(2)}, root / "model-00001-of-00002.safetensors")
    save_file({"b": torch.ones(3), "c": torch.ones(1)}, root / "model-00002-of-00002.safetensors")
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    (root / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": {"a": first, "b": second, "c": second}}))
    return root


def edit_index(root: Path, **changes: object) -> None:
    index = json.loads((root / INDEX_FILE).read_text())
    index["weight_map"].update(changes)
    (root / INDEX_FILE).write_text(json.dumps(index))


def test_sharded(tmp_path: Path) -> None:
    with CheckpointReader(sharded(tmp_path)) as reader:
        assert set(reader.tensors) == {"a", "b", "c"}
        assert torch.equal(reader.read("b"), torch.ones(3))


def test_names_that_the_index_lacks_are_read(tmp_path: Path) -> None:
    root = sharded(tmp_path)
    names = set(CheckpointReader(root).tensors)
    save_file(load_file(root / (last := "model-00002-of-00002.safetensors")) | {"z": torch.ones(2)}, root / last)
    assert set(CheckpointReader(root).tensors) == {*names, "z"}


def test_shards_may_be_links_out_of_the_folder(tmp_path: Path) -> None:
    # So it is in a hub cache: snapshots/x/model.safetensors -> ../../blobs/y
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    for path in sharded(tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(Path("../blobs") / path.name)
    assert len(CheckpointReader(tmp_path / "snapshot").tensors) == 3


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../x.safetensors", "a/../../x", "..", "", 3, None, "a\\..\\b", "a\0b"]
)
def test_index_may_not_leave_the_checkpoint(tmp_path: Path, path: object) -> None:
    edit_index(sharded(tmp_path), b=path)
    with pytest.raises(UserErrors, match="must be a relative path inside the checkpoint"):
        CheckpointReader(tmp_path)


def test_index_faults_are_listed_in_one_error(tmp_path: Path) -> None:
    root = sharded(tmp_path)
    edit_index(root, d="model-00001-of-00002.safetensors", e="model-00003-of-00002.safetensors", f="../f")
    shard = root / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(UserErrors) as caught:
        CheckpointReader(root)
    problems = "\n".join(caught.value.problems)
    assert len(caught.value.problems) == 4
    for word in (
        "00001-of-00002.safetensors: lacks d",
        "00003-of-00002.safetensors: no such file",
        "'../f'",
        "truncated",
    ):
        assert word in problems


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not valid JSON"), ("[]", "must be an object"), ("{}", "weight_map"), ('{"weight_map": {}}', "weight_map")],
)
def test_bad_index(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / INDEX_FILE).write_text(text)
    with pytest.raises(UserError, match=message):
        CheckpointReader(tmp_path)


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file or directory"):
        CheckpointReader(tmp_path / "nowhere")
    with pytest.raises(UserError, match="holds neither"):
        CheckpointReader(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match="safe_serialization"):
        CheckpointReader(tmp_path)
