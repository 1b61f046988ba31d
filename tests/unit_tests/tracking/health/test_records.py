"""Records: written in place, read strictly, whatever lies in the folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mega_rl.tracking.health.records import (
    FILE_BYTES,
    LastWords,
    PhaseRecord,
    clear,
    decode,
    encode,
    health_folder,
    read_records,
    record_path,
    write_record,
)
from tests.unit_tests.operations.diagnosis.examples import call, record

FULL = record(
    3, waiting=call("dp", 17, 1, 3), collectives=(call("tp", 4),), memory={"resident": 5}, log=("a", "b"),
    ended=LastWords("timeout", "late", None, "generate", call("pp", None)),
)  # fmt: skip


def test_written_records_are_read(tmp_path: Path) -> None:
    write_record(tmp_path, FULL)
    first = os.stat(record_path(tmp_path, 3))
    write_record(tmp_path, FULL)
    again = os.stat(record_path(tmp_path, 3))
    assert (first.st_ino, first.st_size) == (again.st_ino, again.st_size) == (first.st_ino, FILE_BYTES)
    assert read_records(tmp_path) == {3: FULL}


def test_long_texts_are_cut_to_fit() -> None:
    long = record(
        phases=tuple(PhaseRecord("é" * 1000, 1.0) for _ in range(50)), log=("\u2603" * 9999,) * 50,
        waiting=call("world", 1, *range(3000)),
    )  # fmt: skip
    data = encode(long)
    assert len(data) == FILE_BYTES
    read = decode(data)
    assert read is not None
    assert read.waiting is not None
    assert read.waiting.ranks == tuple(range(2000))


def test_only_the_latest_generation_counts(tmp_path: Path) -> None:
    for rank, generation in ((0, 1), (1, 0), (2, 1)):
        write_record(tmp_path, record(rank, generation=generation))
    assert list(read_records(tmp_path)) == [0, 2]


def hostile(data: bytes) -> dict[str, bytes]:
    """Files that are no records."""
    raw = json.loads(data)
    other = json.dumps({**raw, "record": {**raw["record"], "step": 4}}).encode()
    return {
        "empty": b"",
        "torn": data[:200],
        "another content under the checksum": other,
        "not JSON": b"\x80" * 100,
        "deep": b"[" * 100_000,
        "a list": b"[]",
        "too large": data + b" " * FILE_BYTES,
        "without record": b'{"crc32": 0}',
    }


@pytest.mark.parametrize("name", hostile(encode(FULL)))
def test_damaged_file_is_left_out(tmp_path: Path, name: str) -> None:
    write_record(tmp_path, record(0))
    record_path(tmp_path, 3).write_bytes(hostile(encode(FULL))[name])
    assert list(read_records(tmp_path)) == [0]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rank", 1.5), ("pid", True), ("beat", 1e300), ("host", 7), ("phases", {}),
        ("phases", [[]]), ("memory", []), ("waiting", {}), ("ended", {"kind": "asleep"}), ("log", [1]),
        ("timeout_s", None), ("step", "3"),
    ],
)  # fmt: skip
def test_field_of_another_type_is_refused(field: str, value: object) -> None:
    import zlib

    fields = {**json.loads(encode(FULL))["record"], field: value}
    checksum = zlib.crc32(json.dumps(fields, sort_keys=True).encode())
    assert decode(json.dumps({"record": fields, "crc32": checksum}).encode()) is None


def test_foreign_files_and_links_are_left_out(tmp_path: Path) -> None:
    folder = health_folder(tmp_path)
    write_record(tmp_path, record(0))
    (folder / "rank_00001.json").symlink_to(record_path(tmp_path, 0))
    os.mkfifo(folder / "rank_00002.json")
    (folder / "rank_00003.json").mkdir()
    (folder / "rank_00004.json").write_bytes(encode(record(0)))  # says that it is another's
    for name in ("rank_x.json", "rank_000001.json", "rank_-0001.json", "rank_٠٠٠٠١.json"):
        (folder / name).write_bytes(encode(record(1)))
    assert list(read_records(tmp_path)) == [0]


def test_clear_leaves_reports_and_folders(tmp_path: Path) -> None:
    clear(tmp_path)  # without a folder
    write_record(tmp_path, record(0))
    folder = health_folder(tmp_path)
    names = ("stacks_00000.txt", "claim_cause_0", "report_20260101_000000.txt")
    for name in names:
        (folder / name).write_text("")
    (folder / "rank_00007.json").mkdir()
    clear(tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == [
        "rank_00007.json", "report_20260101_000000.txt",
    ]  # fmt: skip
