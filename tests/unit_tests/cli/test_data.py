"""`mega-rl data`: problem sets by name from a server that speaks the Hub's protocol, or from files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mega_rl.cli.app import main
from mega_rl.cli.data import boxed, number_after_hashes
from mega_rl.rewards.builtin import math_verify
from tests.helpers.hub_server import Hub, dataset_card, go_offline, parquet_bytes, serve_hub, use_hub

QUESTIONS = ["How many?", "  How much? "]
SOLUTIONS = ["1+1 = <<1+1=2>>2\n#### 2", "Much.\n#### 1,200"]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A server with GSM8K and an empty folder to work in; the datasets library works in this process."""
    monkeypatch.chdir(tmp_path)
    with serve_hub() as server:
        use_hub(server, tmp_path / "home", monkeypatch)
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", server.url)
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "home" / "datasets")
        content = parquet_bytes(question=QUESTIONS, answer=SOLUTIONS)
        files = {"main/train.parquet": content, "main/test.parquet": content}
        server.add("datasets", "openai/gsm8k", {"README.md": dataset_card(main=["train", "test"]), **files})
        yield server


def lines(file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["data", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    return line


def test_gsm8k_by_name(hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["data", "gsm8k", "data/gsm8k", "--instruction", "Box it."]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "data/gsm8k/train.jsonl: 2 rows", "data/gsm8k/test.jsonl: 2 rows",
    ]  # fmt: skip
    assert lines("data/gsm8k/train.jsonl") == lines("data/gsm8k/test.jsonl")
    assert lines("data/gsm8k/train.jsonl") == [
        {"prompt": [{"role": "user", "content": "How many?\nBox it."}], "answer": "2"},
        {"prompt": [{"role": "user", "content": "How much?\nBox it."}], "answer": "1200"},
    ]
    assert "is there already; name another folder, or give --force" in refused(capsys, "gsm8k", "data/gsm8k")
    hub.requests.clear()
    go_offline(monkeypatch)
    assert main(["data", "gsm8k", "data/gsm8k", "--force", "--instruction", ""]) == 0
    assert lines("data/gsm8k/test.jsonl")[0]["prompt"][0]["content"] == "How many?"
    assert hub.requests == []


def test_math_from_files_and_nothing_is_written_when_a_row_is_bad(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    good = {"problem": ["x?"], "solution": ["so \\boxed{\\frac{1}{2}}"]}
    pq.write_table(pa.table(good), "good.parquet")
    Path("good.jsonl").write_text(json.dumps({"problem": "y?", "solution": "\\boxed{3}"}) + "\n")
    Path("bad.jsonl").write_text('{"problem": "y?", "solution": "three"}\n')
    assert main(["data", "math", "out", "--train", "good.parquet", "--test", "good.jsonl"]) == 0
    assert [lines(f"out/{name}.jsonl")[0]["answer"] for name in ("train", "test")] == ["\\frac{1}{2}", "3"]
    line = refused(capsys, "math", "new", "--train", "good.parquet", "--test", "bad.jsonl")
    assert line == "error: --test=bad.jsonl: row 1: 'solution' ends with no final answer: 'three'"
    line = refused(capsys, "gsm8k", "new", "--train", "good.parquet")
    assert "has no column question, answer; its columns are problem, solution" in line
    assert "prompt files are .jsonl or .parquet" in refused(capsys, "gsm8k", "new", "--train", "good.csv")
    assert "shows no dataset of that name" in refused(capsys, "gsm8k", "new", "--train", "openai/gsm9k")
    assert not Path("new").exists()


@pytest.mark.parametrize(
    ("solution", "answer"),
    [("#### 72", "72"), ("a #### 1 \n#### -1,234.50", "-1234.50"), ("#### $5.", "5"), ("72", None), ("#### x", None)],
)
def test_numbers_after_hashes(solution: str, answer: str | None) -> None:
    assert number_after_hashes(solution) == answer
    if answer is not None:
        assert math_verify("", f"so \\boxed{{{answer}}}", answer) == 1.0


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("$\\boxed{1}$ or rather $\\boxed{\\frac{1}{2}}$.", "\\frac{1}{2}"),
        ("\\fbox{3}", "3"),
        ("is $\\boxed 7$.", "7"),
        ("\\boxed{}", None),
        ("nothing", None),
    ],
)
def test_boxes(solution: str, answer: str | None) -> None:
    assert boxed(solution) == answer
