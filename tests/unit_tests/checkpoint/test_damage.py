"""Whatever happens to the files of a checkpoint is found before anything is used, and nothing in a file is executed."""

from __future__ import annotations

import json
import os
import pickle
import random
import resource
import shutil
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from mega_rl.checkpoint import folders
from mega_rl.checkpoint.folders import RunLock
from mega_rl.checkpoint.format.reader import Checkpoint
from mega_rl.cli import checkpoint as verbs
from mega_rl.errors import UserError
from tests.unit_tests.checkpoint import written

FLIPS, TRUNCATIONS = 300, 50
MUTANT_S = 2.0  # for one mutant; each takes some milliseconds
MUTANT_MEMORY_KIB = 300 << 10  # for all mutants together, on top of what the process has


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete checkpoint that no test changes."""
    return written.save(tmp_path_factory.mktemp("run") / "checkpoints", 10)


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return copy_of(original, tmp_path)


def copy_of(original: Path, place: Path) -> Path:
    copy = place / "checkpoints" / original.name
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(original, copy)
    return copy


def check(folder: Path) -> None:
    """Everything that is done before data of a checkpoint is used."""
    checkpoint = Checkpoint.open(folder)
    checkpoint.verify(checkpoint.all_pieces())


def refusal(folder: Path) -> str:
    """The message of the one error that a damaged checkpoint must be refused with."""
    with pytest.raises(UserError) as caught:
        check(folder)
    message = str(caught.value)
    assert len(message) < 10_000
    assert all(line.isprintable() for line in message.split("\n")), repr(message)
    return message


def regions(file: Path) -> list[range]:
    """Parts of a file that are equally likely to be hit, whatever their sizes."""
    size = file.stat().st_size
    if file.suffix != ".safetensors":
        return [range(size)]
    data = 8 + struct.unpack("<Q", file.read_bytes()[:8])[0]
    return [range(8), range(8, data), range(data, size)]


def piece_at(folder: Path, file: Path, offset: int) -> str | None:
    """The tensor that a byte of a file belongs to."""
    checkpoint = Checkpoint.open(folder)
    for piece in checkpoint.all_pieces():
        if piece.file.name == file.name and piece.offset <= offset < piece.offset + piece.spec.nbytes:
            return piece.spec.name
    return None


def test_every_flipped_bit_is_found_and_named(folder: Path) -> None:
    choose = random.Random(0)
    places = [(file, region) for file in sorted(folder.iterdir()) for region in regions(file)]
    names = {}
    for _ in range(FLIPS):
        file, region = choose.choice(places)
        offset, bit = choose.choice(region), choose.randrange(8)
        if (file, offset) not in names:
            names[file, offset] = piece_at(folder, file, offset)
        written.flip(file, offset, bit)
        message = refusal(folder)
        written.flip(file, offset, bit)
        assert str(file) in message or (file.name == "COMMIT" and "COMMIT" in message), message
        name = names[file, offset]
        assert name is None or (name in message and "checksum" in message and "expected" in message), message
    assert len({file for file, _ in names}) == 5
    assert sum(name is not None for name in names.values()) > FLIPS // 8
    check(folder)


def test_every_truncation_is_found_and_named(original: Path, folder: Path) -> None:
    choose = random.Random(1)
    checkpoint = Checkpoint.open(original)
    borders = [(piece.file.name, piece.offset) for piece in checkpoint.all_pieces() if piece.spec.nbytes]
    for file in sorted(original.iterdir()):
        size = file.stat().st_size
        borders += [(file.name, 0), (file.name, 1), (file.name, size - 1)]
        if file.suffix == ".safetensors":
            borders += [(file.name, 7), (file.name, 8), (file.name, 9)]
    while len(borders) < TRUNCATIONS:
        file = choose.choice(sorted(original.iterdir()))
        borders.append((file.name, choose.randrange(file.stat().st_size)))
    for name, size in borders:
        os.truncate(folder / name, size)
        message = refusal(folder)
        assert name in message, message
        if name.endswith(".safetensors"):
            assert f"{size} bytes, expected {(original / name).stat().st_size}" in message, message
        shutil.copy(original / name, folder / name)
    check(folder)


def swap_shards(folder: Path) -> None:
    first, second = folder / "shard_00000.safetensors", folder / "shard_00001.safetensors"
    first.rename(folder / "aside")
    second.rename(first)
    (folder / "aside").rename(second)


SHARD = "shard_00001.safetensors"
MIXED_UP: dict[str, tuple[Callable[[Path], object], str]] = {
    "swapped": (swap_shards, SHARD),
    "missing": (lambda folder: (folder / SHARD).unlink(), f"{SHARD}: cannot be read (No such file or directory)"),
    "too many": (
        lambda folder: shutil.copy(folder / SHARD, folder / "shard_00003.safetensors"),
        "shard_00003.safetensors: is not in manifest.json",
    ),
    "another step": (lambda folder: folder.rename(folder.with_name("step_000020")), "step=10"),
    **{
        f"{name} of another": (
            lambda folder, name=name: shutil.copy(written.save(folder / "other", 20, seed=1) / name, folder / name),
            name,
        )
        for name in (SHARD, "manifest.json", "COMMIT")
    },
}


@pytest.mark.parametrize("case", MIXED_UP)
def test_mixed_up_files_are_named(case: str, folder: Path) -> None:
    change, message = MIXED_UP[case]
    change(folder)
    assert message in refusal(next(folder.parent.glob("step_*")))


@pytest.mark.parametrize("name", ["COMMIT", "manifest.json", "shard_00000.safetensors"])
@pytest.mark.parametrize("kind", ["link", "outside link", "pipe", "folder", "device"])
def test_irregular_files_are_refused(name: str, kind: str, folder: Path, tmp_path: Path) -> None:
    file = folder / name
    aside = (folder if kind == "link" else tmp_path) / "aside"
    file.rename(aside)
    if kind.endswith("link"):
        file.symlink_to(aside)
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    else:
        file.symlink_to("/dev/zero")
    assert name in refusal(folder)
    assert folders.complete(folder.parent) == ([folder] if name.startswith("shard") else [])
    assert verbs.list_(folder.parent, as_json=True) == (1 if name.startswith("shard") else 0)


# Values that stand for whole classes of mistakes: types, signs, sizes, text that is no name.
BAD: list[Any] = [None, True, -1, 1.5, 1 << 70, "x", "", [], {}, [1], {"a": 1}, 10**400, "../x", "/etc/passwd", "a\0b"]


Change = Callable[[dict[str, Any]], object]


def put(raw: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        raw = raw[key]
    raw[path[-1]] = value


def mutants(mistakes: Mapping[tuple[Any, ...], Iterable[Any]]) -> Iterator[tuple[str, Change]]:
    """Changes that put each value at its place."""
    for path, values in mistakes.items():
        for value in values:
            yield f"{path}={value!r:.40}", lambda raw, path=path, value=value: put(raw, path, value)


def manifest_mutants() -> Iterator[tuple[str, Change]]:
    """Changes of the manifest, each a mistake."""
    objects = ("identity", "state", "config", "versions")
    maps = ("metrics", "numbers")
    for key in ("format", "version", "step", "world_size", "tensors", "shards", *objects, *maps):
        yield f"{key} missing", lambda raw, key=key: raw.pop(key)  # type: ignore[misc]
        bad = [value for value in BAD if key not in objects or not isinstance(value, dict)]
        bad = [value for value in bad if key not in maps or value != {}]
        yield from mutants({(key,): [value for value in bad if key != "metrics" or value != {"a": 1}]})
    matrix, sizes = ("tensors", written.MATRIX), [12, 16]
    shapes = [[12, 17], [13, 16], [192], [16, 12], [12, 16, 1], [], [0, 16], [12, True], [1 << 62] * 9, [2] * 40]
    shapes += [[1 << 65], [10**18, 10**18], [["12"], 16]]
    names = ("", "/abs", "a/../b", "..", "a//b", "a\0b", "a\nb", "a\\b", "x" * 2000, "\ud800", "a@0,0", "actor/more")
    shard = "shard_00001.safetensors"
    outside = (f"../{shard}", f"/tmp/{shard}", f"a/{shard}", f"{shard}\0", "shard_1.safetensors", "latest")
    mistakes: dict[tuple[Any, ...], Iterable[Any]] = {
        ("world_size",): (-1, 0, 1.0, "3", None, True, 1 << 64),
        ("layout",): (1, None, ["tp1"]),
        ("saved_at",): (1, None),
        ("numbers", "actor", "lr"): (None, "1", True, [1], {}),
        ("metrics", "val/reward_mean"): (None, "1", True, [1], {}),
        **{("tensors", name): [["F32", [1]]] for name in names},
        matrix: ("F32", ["F32"], ["F99", sizes], [1, sizes], [[], sizes], ["F32", 12], ["F32", [12, -16]]),
        (*matrix, 1): shapes,
        (*matrix, 0): ("BF16", "I64", "F64", "f32", "", None),
        ("shards", 0): BAD,
        **{("shards", 1, key): BAD for key in ("file", "bytes", "header")},
        ("shards", 0, "file"): (*outside, "shard_0000١.safetensors"),
        ("shards", 0, "more"): [1],
    }
    yield from mutants(mistakes)
    yield "tensor renamed", lambda raw: put(raw, ("tensors", "actor/other"), raw["tensors"].pop(written.MATRIX))
    yield "tensor lost", lambda raw: raw["tensors"].pop(written.VECTOR)
    yield "shard twice", lambda raw: raw["shards"].append(raw["shards"][0])
    yield "shard lost", lambda raw: raw["shards"].pop()
    yield "shard more", lambda raw: raw["shards"].append({**raw["shards"][0], "file": "shard_00009.safetensors"})
    yield "shard without bytes", lambda raw: raw["shards"][0].pop("bytes")
    yield "header in capitals", lambda raw: raw["shards"][0].update(header=raw["shards"][0]["header"].upper() + "A")


MANIFEST_TEXTS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda text: b"",
    "a list": lambda text: b"[" + text + b"]",
    "no end": lambda text: text.rstrip()[:-1],
    "key twice": lambda text: text.replace(b'{"format"', b'{"step":10,"format"', 1),
    "tensor twice": lambda text: text.replace(b'"tensors":{', b'"tensors":{"actor/weights/norm":["BF16",[10]],', 1),
    "NaN": lambda text: text.replace(b'"metrics":{', b'"metrics":{"a":NaN', 1),
    "overflow where all is free": lambda text: text.replace(b'"config":{', b'"config":{"a":[-1e999],', 1),
    "many digits": lambda text: text.replace(b'"step":10', b'"step":' + b"9" * 10_000, 1),
    "deep lists": lambda text: text.replace(b'"state":{', b'"state":{"a":' + b"[" * 200_000, 1),
    "deep objects": lambda text: b'{"a":' * 100_000,
    "no text": lambda text: b"\xff\xfe" + text,
    "1000 strange keys": lambda text: json.dumps({f"k{i}": i for i in range(1000)}).encode(),
    "1000 faults": lambda text: json.dumps(
        {**json.loads(text), "tensors": {f"t{i}": ["F99", [-1]] for i in range(1000)}}
    ).encode(),
}


def header_mutants() -> Iterator[tuple[str, Change]]:
    """Changes of a shard's header, each a mistake; the manifest vouches for them."""
    key, meta, name = written.MATRIX + "@5,0", "__metadata__", written.MATRIX
    shapes: list[Any] = [None, 7, "7", [7], [7, -7], [7, 8], [7, 7, 1], [7, 7.0], [7, True], [1 << 70], [0], [[7], 7]]
    offsets: list[Any] = [None, 0, "0", [], [0], [0, 1], [196, 0], [-1, 195], [0, 196, 197], [0.0, 196.0], [0, 1 << 80]]
    deep = '{"a":' + "[" * 100_000
    mistakes: dict[tuple[Any, ...], Iterable[Any]] = {
        (key, "dtype"): (None, 1, -1, 1.5, "F99", "", [], {}, True, "f32", "BF16", "I64"),
        (key, "shape"): (*shapes, [2] * 40, [1 << 62] * 16, [49, 1], [10**400]),
        (key, "data_offsets"): (*offsets, [1, 197], [10**10, 10**10 + 196], {"0": 196}),
        (key,): (None, 1, [], "x"),
        (meta,): (None, 1, [], "x", {}),
        (meta, "format"): (None, 1, {}, "", "pt", "mega_rl shard 2"),
        (meta, "checksums"): (None, 1, {}, "", "x", "[]", "{}", "{", '{"a":1}', '{"a":NaN}', '{"a":1,"a":2}', deep),
        (meta, "more"): ["1"],
    }
    yield from mutants(mistakes)
    for field in ("dtype", "shape", "data_offsets"):
        yield f"no {field}", lambda raw, field=field: raw[key].pop(field)  # type: ignore[misc]
    yield "piece lost", lambda raw: raw.pop(key)
    yield "no metadata", lambda raw: raw.pop(meta)
    endings = ["@", "@5", "@5,0,0", "@-5,0", "@5,10", "@6,0", "@5.0,0", "@٥,0", "@05,0", "@ 5,0", "@5,,0", ""]
    others = ("@5,0", "other@5,0", "../x@0,0", "a\0b@0,0", "\ud800@0,0", "x" * 5000)
    for renamed in (*(name + ending for ending in endings), name + "@" + "9" * 31, *others):

        def rename(raw: dict[str, Any], renamed: str = renamed) -> None:
            raw[renamed] = raw.pop(key)
            sums = json.loads(raw[meta]["checksums"])
            raw[meta]["checksums"] = json.dumps({**sums, renamed: sums.pop(key)})

        yield f"named {renamed!r:.40}", rename
    sums = (None, 1, "", "0" * 15, "0" * 17, "g" * 16, "A" * 16, "0x" + "0" * 14, "٠" * 16, "0" * 16)
    for place, value in [*((key, value) for value in sums), ("x@", "0" * 16)]:

        def put_sum(raw: dict[str, Any], place: str = place, value: Any = value) -> None:
            raw[meta]["checksums"] = json.dumps({**json.loads(raw[meta]["checksums"]), place: value})

        yield f"checksum {place}={value!r}", put_sum


HEADER_TEXTS: dict[str, tuple[Callable[[bytes], bytes], int | None]] = {
    "10 GB": (lambda text: text, 10 << 30),
    "more than the file": (lambda text: text, 1 << 20),
    "a list": (lambda text: b"[]", None),
    "key twice": (lambda text: text[:-1] + b',"__metadata__":{}}', None),
    "deep lists": (lambda text: b'{"a":' + b"[" * 200_000, None),
    "no text": (lambda text: b"\xff" * 64, None),
    "no end": (lambda text: text[:-2], None),
}


def test_mutants_of_manifest_and_headers(original: Path, tmp_path: Path) -> None:
    """Each is one error, soon, and none takes memory for what a file only claims."""
    unchanged = copy_of(original, tmp_path)
    written.edit_manifest(unchanged, lambda raw: None)
    written.edit_header(unchanged / SHARD, lambda raw: None)
    check(unchanged)  # the tools that make the mutants break nothing themselves
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    count = 0

    def attempt(label: str, change: Callable[[Path], None]) -> None:
        nonlocal count
        folder = copy_of(original, tmp_path)
        change(folder)
        begin = time.monotonic()
        try:
            message = refusal(folder)
        except BaseException as error:
            raise AssertionError(f"mutant {label}") from error
        assert str(folder) in message, label
        assert time.monotonic() - begin < MUTANT_S, label
        count += 1

    for label, change in manifest_mutants():
        attempt(f"manifest: {label}", lambda folder, change=change: written.edit_manifest(folder, change))  # type: ignore[misc]
    for label, rewrite in MANIFEST_TEXTS.items():
        text = rewrite((original / "manifest.json").read_bytes())
        attempt(f"manifest: {label}", lambda folder, text=text: written.put_manifest(folder, text))  # type: ignore[misc]
    for label, change in header_mutants():
        attempt(f"header: {label}", lambda folder, change=change: written.edit_header(folder / SHARD, change))  # type: ignore[misc]
    plain = json.dumps(written.header_of(original / SHARD)).encode()
    for label, (rewrite, length) in HEADER_TEXTS.items():
        text = rewrite(plain)
        attempt(f"header: {label}", lambda f, t=text, n=length: written.put_header(f / SHARD, t, length=n))  # type: ignore[misc]
    for commit in (b"", b"{}", b"[]", b"1", b"\xff", b"{" * 500, b'{"manifest":"","bytes":0}', b"0" * 5000, b"null"):
        attempt(f"COMMIT: {commit[:20]!r}", lambda f, c=commit: (f / "COMMIT").write_bytes(c))  # type: ignore[misc]
    for suffix in (b" ", b"\n", b"\0", b"{}"):
        commit = (original / "COMMIT").read_bytes() + suffix
        attempt(f"COMMIT and {suffix!r}", lambda f, c=commit: (f / "COMMIT").write_bytes(c))  # type: ignore[misc]
    assert count >= 200
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < MUTANT_MEMORY_KIB


def test_overlap_as_large_as_gap_is_found(folder: Path) -> None:
    """The number of elements alone would not tell."""

    def move(raw: dict[str, Any]) -> None:
        old, new = written.MATRIX + "@6,7", written.MATRIX + "@5,7"
        raw[written.MATRIX + "@4,7"] = raw.pop(old)
        raw["__metadata__"]["checksums"] = raw["__metadata__"]["checksums"].replace(old, written.MATRIX + "@4,7")
        assert new not in raw

    written.edit_header(folder / "shard_00002.safetensors", move)
    message = refusal(folder)
    assert "overlap" in message
    assert written.MATRIX in message


class Canary:
    """Makes a file when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.trace,)


def test_nothing_in_a_file_is_executed(original: Path, tmp_path: Path) -> None:
    trace = tmp_path / "canary"
    torch.save(Canary(trace), tmp_path / "saved")
    payloads = {f"protocol {n}": pickle.dumps(Canary(trace), protocol=n) for n in (0, 2, 4, 5)}
    payloads["torch.save"] = (tmp_path / "saved").read_bytes()
    assert not trace.exists()
    names = [
        *("COMMIT", "manifest.json", "shard_00000.safetensors", "shard_00001.safetensors", "shard_00007.safetensors"),
        *(".metadata", "common.pt", "shard_00000.done", "../latest", "../.lock", "../.latest.new"),
        *("../.step_000020.tmp/shard_00000.done", "../.step_000020.tmp/COMMIT", "../step_000030/COMMIT"),
    ]
    for payload in payloads.values():
        for name in names:
            folder = copy_of(original, tmp_path)
            shutil.rmtree(folder.parent / ".step_000020.tmp", ignore_errors=True)
            shutil.rmtree(folder.parent / "step_000030", ignore_errors=True)
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(payload)
            use_everything(folder)
            assert not trace.exists(), name
        # The same where the text is expected that a checksum vouches for.
        folder = copy_of(original, tmp_path)
        written.put_manifest(folder, payload)
        use_everything(folder)
        folder = copy_of(original, tmp_path)
        written.put_header(folder / "shard_00001.safetensors", payload)
        use_everything(folder)
        assert not trace.exists()
    pickle.loads(payloads["protocol 4"])
    assert trace.exists(), "the canary itself is dead"


def use_everything(folder: Path) -> None:
    """All that reads files of checkpoints; errors are for other tests."""
    root = folder.parent
    uses: list[Callable[[], object]] = [
        lambda: check(folder),
        lambda: folders.complete(root),
        lambda: folders.torn(root),
        lambda: verbs.list_(root, as_json=True),
        lambda: verbs.verify(root, as_json=True),
        lambda: RunLock(root).__enter__().release(),  # type: ignore[func-returns-value]
        lambda: folders.surplus(root, newest_step=10, keep=1, keep_interval=0, keep_best="a"),
    ]
    for use in uses:
        try:
            use()
        except UserError:
            continue
