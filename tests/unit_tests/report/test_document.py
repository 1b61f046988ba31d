"""The page as a text: closed in itself, hostile texts inert, bounded in size. In a browser: test_page.py."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mega_rl.cli.app import app
from mega_rl.config.schema import Config
from mega_rl.errors import UserError
from mega_rl.report import document
from mega_rl.report.document import MAX_BYTES, page_of, to_script_data
from mega_rl.report.runs import read_runs
from tests.unit_tests.report.planted import HEALTHY, HOSTILE, dump, plant, record


def content(page: str) -> dict[str, object]:
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert data
    return json.loads(data[1])


def test_hostile_texts_are_data(tmp_path: Path) -> None:
    run = plant(tmp_path / "<b>a", settings={"model": {"path": HOSTILE}}, curves={**HEALTHY, f"own/{HOSTILE}": float})
    dump(run)
    record(run)
    page = page_of(read_runs([run]))
    assert "<script>alert" not in page
    assert "<img" not in page
    assert "<b>a" not in page
    assert page.count("<script") == page.count("</script>") == 2
    assert HOSTILE in json.dumps(content(page), ensure_ascii=False).replace('\\"', '"')


def test_data_of_a_script_ends_no_element() -> None:
    text = to_script_data({"a": "</script><!--<script>&\u2028"})
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {"a": "</script><!--<script>&\u2028"}


def test_a_page_asks_no_network_and_runs_its_own_program_alone(tmp_path: Path) -> None:
    page = page_of(read_runs([plant(tmp_path / "a")]))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy
    rules = dict(rule.split(" ", 1) for rule in html.unescape(policy[1]).split("; "))
    assert rules["default-src"] == rules["connect-src"] == "'none'"
    for tag, rule in (("script", "script-src"), ("style", "style-src")):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.S)
        assert rules[rule] == f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
    program = page.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|src=|url\(|@import|\son[a-z]+=", re.sub(r'id="data">.*?</script>', "", program))


def test_a_page_of_a_hundred_thousand_steps_is_small(tmp_path: Path) -> None:
    names = [f"actor/number_{number}" for number in range(3)]
    line = ", ".join(f'"{name}": 0.123456789' for name in names)
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {step}, {line}}}\n' for step in range(1, 100_001)))
    dump(folder, response="x" * 6000, count=200)
    page = page_of(read_runs([folder]))
    assert len(page.encode()) < MAX_BYTES


def test_a_page_that_would_be_too_large_gets_coarser_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = read_runs([plant(tmp_path / "a", steps=900)])
    whole = len(page_of(runs).encode())
    monkeypatch.setattr(document, "MAX_BYTES", whole - 20_000)
    assert len(page_of(runs).encode()) < whole - 20_000


def test_a_page_of_one_run_names_settings_that_are_not_the_default(tmp_path: Path) -> None:
    own = {"reward": {"functions": {"exact": "math_verify"}}, "model": {"path": ""}, "trainer": {"steps": 7}}
    run = plant(tmp_path / "a", settings=own)
    assert content(page_of(read_runs([run])))["changed"] == {
        "reward.functions.exact": None, "trainer.steps": str(Config().trainer.steps),
    }  # fmt: skip
    assert content(page_of(read_runs([run, plant(tmp_path / "b")])))["changed"] == {}


def test_the_command_writes_the_page_into_the_run(tmp_path: Path) -> None:
    run = plant(tmp_path / "a")
    result = CliRunner().invoke(app, ["report", str(run)])
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == str(run / "report.html")
    assert sorted(path.name for path in run.iterdir()) == ["config.yaml", "metrics.jsonl", "report.html"]


def test_the_command_refuses_another_ending(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(plant(tmp_path / "a")), "--out", "page.png"])
    assert isinstance(result.exception, UserError)
    assert "must end in .html" in str(result.exception)
