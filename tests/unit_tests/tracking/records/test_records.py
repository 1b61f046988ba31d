"""Records on the disk: bounded, whole or not at all, readable without torch, and checked when they are read."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from mega_rl import disk
from mega_rl.disk import SaveError
from mega_rl.errors import UserError
from mega_rl.tracking.records.reader import RECORD_FILE, RecordDescription, read_record, records
from mega_rl.tracking.records.writer import RecordWriter, clear_records, size_of
from tests.helpers.fakes import FakeRanks

DESCRIPTION = RecordDescription(
    step=1, prompts=2, kl_coef=0.0, reward_parts=(), reward_weights=(), config={"optim": {"lr": 1e-6}}, model={},
    weights=(), layout="1", world_size=1, device="cpu", dtype="fp32", versions={},
)  # fmt: skip
MIB = 1 << 20


def columns(*, width: int = 4, shift: float = 0.0) -> dict[str, Tensor]:
    """Return rows of two prompts and two samples, the last one first."""
    return {
        "prompt_index": torch.tensor([1, 1, 0, 0]),
        "sample_index": torch.tensor([1, 0, 1, 0]),
        "tokens": torch.arange(4 * width, dtype=torch.int32).view(4, width),
        "loss_mask": torch.ones(4, width, dtype=torch.bool),
        "advantages": torch.arange(4 * width).view(4, width).float() + shift,
    }


def rows() -> list[dict[str, object]]:
    return [{"prompt_index": p, "sample_index": s, "token_texts": ["a"]} for p, s in ((1, 1), (1, 0), (0, 1), (0, 0))]


def writer(root: Path, *, limit: int = 64 * MIB) -> RecordWriter:
    return RecordWriter(root, limit, FakeRanks(), replica=0, is_first=True)


def test_record_comes_back_by_prompts_and_samples(tmp_path: Path) -> None:
    assert writer(tmp_path)(replace(DESCRIPTION, step=7), columns(), rows())
    record = read_record(tmp_path / "step_000007")
    assert list(record.tensors) == ["prompt_index", "sample_index", "tokens", "loss_mask", "advantages"]
    assert record.tensors["prompt_index"].tolist() == [0, 0, 1, 1]
    assert record.tensors["sample_index"].tolist() == [0, 1, 0, 1]
    np.testing.assert_array_equal(record.tensors["advantages"], columns()["advantages"].flip(0).numpy())
    assert [(row["prompt_index"], row["sample_index"]) for row in record.rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert record.description == replace(DESCRIPTION, step=7)


def test_long_run_keeps_to_the_bound(tmp_path: Path) -> None:
    limit = 3 * MIB
    record = writer(tmp_path, limit=limit)
    for step in range(1, 40):
        width = 10_000 + 1_000 * (step % 7)  # a step is of some 0.4 MiB
        assert record(replace(DESCRIPTION, step=step), columns(width=width), rows())
        assert size_of(tmp_path) <= limit
    steps = [int(path.name.removeprefix("step_")) for path in records(tmp_path)]
    assert steps == list(range(steps[0], 40))  # the newest
    assert len(steps) > 4


def test_too_large_step_is_not_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    record = writer(tmp_path, limit=MIB)
    assert record(DESCRIPTION, columns(), rows())
    with caplog.at_level(logging.WARNING):
        assert not record(replace(DESCRIPTION, step=2), columns(width=100_000), rows())
    assert "step 2 is not recorded" in caplog.text
    assert "metrics.records.max_mib=1" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]  # the older one stays


def test_failed_write_leaves_no_half_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path, text: str) -> None:
        raise SaveError(f"{path}: cannot be written (No space left on device)")

    monkeypatch.setattr(disk, "write_text", full)
    with caplog.at_level(logging.WARNING):
        assert not writer(tmp_path)(DESCRIPTION, columns(), rows())
    assert "No space left on device); training continues" in caplog.text
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    assert writer(tmp_path)(DESCRIPTION, columns(), rows())


def test_start_removes_remains_and_later_steps(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        writer(tmp_path)(replace(DESCRIPTION, step=step), columns(), rows())
    (tmp_path / ".step_000004.tmp").mkdir()
    (tmp_path / ".step_000003.removed").mkdir()
    (tmp_path / "notes.txt").write_text("of the user")
    clear_records(tmp_path, after=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "step_000001", "step_000002"]


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        (RECORD_FILE, b'"format": 1', b'"format": 9', "format=9, this version reads 1"),
        (RECORD_FILE, b"replica_00000.jsonl", b"../../../etc/passwd", "does not belong to a record"),
        (RECORD_FILE, b'"advantages"', b'"advant"', "unknown tensors"),
        (RECORD_FILE, b'"step": 1', b'"step": "x"', "is not a record"),
        (RECORD_FILE, b"{", b"", "not valid JSON"),
        ("replica_00000.safetensors", b"\x00\x00", b"\x00\x01", "by its checksum"),
        ("replica_00000.jsonl", b'"a"', b'"b"', "by its checksum"),
    ],
)
def test_damaged_record_is_refused_in_one_line(tmp_path: Path, file: str, old: bytes, new: bytes, message: str) -> None:
    writer(tmp_path)(DESCRIPTION, columns(), rows())
    path = tmp_path / "step_000001" / file
    path.write_bytes(path.read_bytes().replace(old, new, 1))
    with pytest.raises(UserError, match=message) as failure:
        assert read_record(tmp_path / "step_000001").rows
    assert "\n" not in str(failure.value)
