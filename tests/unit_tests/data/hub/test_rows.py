"""Datasets by name: one split as a Parquet file, named by its commit."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pyarrow.parquet as pq
import pytest

from mega_rl.config.render import resolved_yaml
from mega_rl.data import hub as rows
from mega_rl.data.hub import DatasetName
from mega_rl.errors import UserError
from mega_rl.plan.preflight import preflight
from tests.helpers.hub_server import Hub, dataset_card, parquet_bytes

pytestmark = pytest.mark.slow

MODEL = "model.path=org/model"


@pytest.fixture
def gsm(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """The server with openai/gsm8k: main (train, test) and socratic (train), six rows each."""
    files = {
        f"{place}.parquet": parquet_bytes(prompt=[f"{place} {i}" for i in range(6)], answer=[str(i) for i in range(6)])
        for place in ("main/train", "main/test", "socratic/train")
    }
    card = dataset_card(main=["train", "test"], socratic=["train"])
    hub.add("datasets", "openai/gsm8k", {"README.md": card, "gsm8k_notes.md": b"", **files})
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.url)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "home" / "datasets")
    return hub


def first_prompt(file: str | Path) -> str:
    return str(pq.read_table(file)["prompt"][0].as_py())


def problem(text: str) -> str:
    with pytest.raises(UserError) as caught:
        preflight([None], [MODEL, f"data.train_files=['{text}']"])
    (line,) = str(caught.value).splitlines()
    return line


def test_a_run_reads_rows_by_name_and_records_their_commit(gsm: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Next to a local file."""
    gsm.cuts["train.parquet"] = [100]
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    (config,) = preflight([None], [MODEL, "data.train_files=[openai/gsm8k:main, d.jsonl]"])
    commit = gsm.repos["datasets", "openai/gsm8k"].revisions["main"]
    assert first_prompt(config.data.train_files[0]) == "main/train 0"
    assert config.data.train_files[1] == "d.jsonl"
    assert f"train_files: ['openai/gsm8k:main:train@{commit}', d.jsonl]" in resolved_yaml(config)
    assert {r.authorization for r in gsm.requests if "/openai/" in r.path} == {"Bearer hf_good"}
    Path("again.yaml").write_text(resolved_yaml(config))
    gsm.requests.clear()
    assert preflight([Path("again.yaml")]) == [config]
    assert gsm.requests == []


@pytest.mark.parametrize(
    ("name", "role", "rows_of"),
    [
        ("openai/gsm8k:main:test", "train", "main/test"),
        ("openai/gsm8k:main", "train", "main/train"),
        ("openai/gsm8k:main", "validation", "main/test"),
        ("openai/gsm8k:socratic", "validation", "socratic/train"),
        ("openai/gsm8k:main:train[2:4]", "train", "main/train"),
    ],
)
def test_parts_that_are_left_out(gsm: Hub, name: str, role: rows.Role, rows_of: str) -> None:
    file, pinned = rows.fetch_rows(_parsed(name), role=role, label=name)
    assert first_prompt(file).startswith(rows_of)
    assert pinned.pinned
    assert len(pq.read_table(file)) == (2 if "[" in name else 6)
    assert rows.fetch_rows(_parsed(str(pinned)), role="train", label=name) == (file, pinned)


def test_jsonl_repositories_have_a_default_configuration(gsm: Hub) -> None:
    lines = "".join(json.dumps({"prompt": f"q{i}", "answer": str(i)}) + "\n" for i in range(3))
    gsm.add("datasets", "org/plain", {"test.jsonl": lines.encode()})
    file, pinned = rows.fetch_rows(_parsed("org/plain"), role="validation", label="x")
    assert (pinned.config, pinned.split) == ("default", "test")
    assert first_prompt(file) == "q0"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("openai/gsm8k", "name one of its configurations, as openai/gsm8k:main; legal: main, socratic"),
        ("openai/gsm8k:mian", "has no configuration 'mian'; legal: main, socratic"),
        ("openai/gsm8k:main:tset", "has no split 'tset'; legal: train, test"),
        ("openai/gsm8k@v9", "the dataset has no revision 'v9' at {url}"),
        ("openai/gsm9k", "there is no such file or folder here, and {url} shows no dataset of that name"),
        ("gated/rows", "access to it is restricted: accept its terms at {url}/datasets/gated/rows, then set HF_TOKEN"),
        ("org/script", "the datasets library cannot read it: RuntimeError: Dataset scripts are no longer supported"),
    ],
)
def test_what_cannot_be_read_is_one_line(gsm: Hub, name: str, words: str) -> None:
    gsm.add("datasets", "gated/rows", {"a.jsonl": b"{}\n"}, gated=True, token="hf_good")
    gsm.add("datasets", "org/script", {"script.py": b"raise SystemExit", "README.md": b""})
    line = problem(name)
    assert line.startswith(f"data.train_files={name}: ")
    assert words.format(url=gsm.url) in line


def _parsed(text: str) -> DatasetName:
    from mega_rl.data.hub import dataset_name

    name = dataset_name(text)
    assert name is not None
    return name
