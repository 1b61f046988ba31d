"""Samples of a page: newest first, tokens of records before texts, bounded in size."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mega_rl.tracking.report.page import read_samples
from tests.unit_tests.tracking.report.planted import dump, plant, record


def test_newest_dumps_come_first(tmp_path: Path) -> None:
    run = plant(tmp_path / "a")
    for name in ("step_000020.jsonl", "val_000040.jsonl", "step_000060.jsonl"):
        dump(run, name)
    sources = [row["source"] for row in read_samples(run)[0]]
    assert sources == ["step 60", "validation of step 40", "step 20"]


def test_only_sampled_tokens_have_values(tmp_path: Path) -> None:
    record(plant(tmp_path / "a"))
    dump(tmp_path / "a")
    rows = read_samples(tmp_path / "a")[0]
    assert [row["source"] for row in rows] == ["record of step 20", "record of step 20", "step 20"]
    values = rows[0]["values"]
    assert list(values) == ["advantage", "log-prob difference", "entropy estimate (-log p)", "log-prob over reference"]
    for column in values.values():
        assert len(column) == len(rows[0]["texts"]) == 12
        assert column[:4] == [None] * 4
        assert None not in column[4:]
    assert values["log-prob over reference"][4] == pytest.approx(0.1, rel=1e-3)


@pytest.mark.parametrize("damage", ["record.json", "replica_00000.safetensors", "replica_00000.jsonl"])
def test_damaged_record_is_named_and_left_out(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    place = record(plant(tmp_path / "a"))
    (place / damage).write_text("{}\n")
    dump(tmp_path / "a")
    assert [row["source"] for row in read_samples(tmp_path / "a")[0]] == ["step 20"]
    assert str(place) in caplog.text


def test_record_cannot_lead_out_of_its_folder(tmp_path: Path) -> None:
    place = record(plant(tmp_path / "a"))
    files = [{"file": "../../../secret.safetensors"}, {"file": "/secret.safetensors"}]
    content = json.loads((place / "record.json").read_text())
    (place / "record.json").write_text(json.dumps({**content, "files": files}))
    assert read_samples(tmp_path / "a")[0] == []


def test_samples_without_room_are_counted(tmp_path: Path) -> None:
    dump(plant(tmp_path / "a"), response="long " * 10_000, count=12)
    rows, left_out = read_samples(tmp_path / "a", max_characters=50_000)
    assert 0 < len(rows) < 12
    assert len(rows) + left_out == 12
    assert len(json.dumps(rows)) < 55_000
    assert "characters left out" in rows[0]["response"]


@pytest.mark.parametrize("place", ["rollouts/step_000099.jsonl", "records/step_000099/record.json"])
def test_pipe_without_writer_is_left_out(tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture) -> None:
    dump(plant(tmp_path))
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(tmp_path / place)
    assert read_samples(tmp_path)[0]
    assert "left out of the report" in caplog.text
