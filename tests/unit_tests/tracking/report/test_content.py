"""Runs as a report reads them, and the page as a text: closed in itself, bounded. In a browser: test_page.py."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
import runpy
from array import array
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mega_rl.cli.app import app
from mega_rl.errors import UserError
from mega_rl.tracking.metrics.records import Series
from mega_rl.tracking.report import content
from mega_rl.tracking.report.content import (
    MAX_BYTES,
    Grid,
    Run,
    differing_keys,
    make_grid,
    page_of,
    read_runs,
    seed_groups,
    thin,
)
from tests.unit_tests.tracking.report.planted import HEALTHY, HOSTILE, dump, plant, record

ROOT = Path(__file__).parents[4]


def run_of(*lengths: int) -> Run:
    curves = {f"x/{n}": Series(array("q", range(1, n + 1)), array("d", [0.5] * n)) for n in lengths}
    return Run(Path("run"), "run", curves, {})


def data_of(page: str) -> dict[str, Any]:
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert data
    return json.loads(data[1])


# -- folders of runs --------------------------------------------------------------------------------------------------


def test_run_has_series_and_flat_settings(tmp_path: Path) -> None:
    """A last line that is being written is left out."""
    with (plant(tmp_path / "a", steps=5) / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "rew')
    (run,) = read_runs([tmp_path / "a"])
    assert list(run.series["reward/mean"].steps) == [1, 2, 3, 4, 5]
    assert run.config == {"trainer.seed": "0", "trainer.run_dir": str(tmp_path / "a"), "optim.lr": "1e-06"}
    assert (run.label, run.last_step) == ("a", 5)
    (tmp_path / "a" / "metrics.jsonl").unlink()
    (begun,) = read_runs([tmp_path / "a"])
    assert (begun.series, begun.last_step, begun.config["optim.lr"]) == ({}, 0, "1e-06")


def test_runs_are_grouped_by_their_seeds(tmp_path: Path) -> None:
    seeds = [
        plant(tmp_path / f"s{seed}", settings={
            "trainer": {"seed": seed, "run_dir": str(tmp_path / f"s{seed}")},
            "data": {"train_files": [f"{tmp_path}/s{seed}/data/train.jsonl"]},
        })
        for seed in (0, 1)
    ]  # fmt: skip
    other = plant(tmp_path / "other", settings={"optim": {"lr": 2e-6}})
    runs = read_runs([seeds[0], other, seeds[1]])
    assert seed_groups(runs) == [[0, 2], [1]]
    assert "optim.lr" in differing_keys(runs)
    for seed in seeds:
        (seed / "config.yaml").unlink()
    runs = read_runs(seeds)
    assert seed_groups(runs) == [[0], [1]]
    assert differing_keys(runs) == []


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.yaml", "a: [", r"config\.yaml: cannot be read"),
        ("config.yaml", "a: &a [x]\nb: *a\n", r"config\.yaml: cannot be read: line 1: anchors"),
        ("config.yaml", "- 1\n", r"config\.yaml: is not the config of a run"),
        ("audit.json", "{}", r"audit\.json: is not an audit"),
        ("metrics.jsonl", "nonsense\n", r"metrics\.jsonl: cannot be read: .* line 1"),
    ],
)
def test_damaged_file_is_named(tmp_path: Path, file: str, text: str, message: str) -> None:
    (plant(tmp_path) / file).write_text(text)
    with pytest.raises(UserError, match=message):
        read_runs([tmp_path])


# -- curves -----------------------------------------------------------------------------------------------------------


def test_short_run_keeps_every_value() -> None:
    run = run_of(60)
    grid = make_grid([run])
    assert grid == Grid(1, 1, 60)
    assert thin(run.series["x/60"], grid) == {"at": None, "mean": [0.5] * 60}
    series = Series(array("q", [1, 2, 3]), array("d", [1.0, math.nan, 3.0]))
    assert thin(series, Grid(1, 1, 3)) == {"at": [0, 2], "mean": [1, 3], "bad": [1]}


def test_long_run_keeps_means_and_extremes() -> None:
    values = array("d", [math.sin(step / 1000) for step in range(100_000)])
    values[54_321] = 77.0
    values[4_321] = -55.0
    series = Series(array("q", range(1, 100_001)), values)
    grid = make_grid([Run(Path("run"), "run", {"x/y": series}, {})])
    curve = thin(series, grid)
    assert grid.columns <= 1000
    assert len(curve["mean"]) == len(curve["low"]) == len(curve["high"]) == grid.columns
    assert max(curve["high"]) == 77
    assert min(curve["low"]) == -55
    assert curve["high"].index(77) == grid.column(54_322)
    middle = grid.columns // 3
    inside = values[middle * grid.width : (middle + 1) * grid.width]
    assert curve["mean"][middle] == pytest.approx(sum(inside) / len(inside), rel=1e-3)  # four digits are kept


# -- names of metrics -------------------------------------------------------------------------------------------------


def test_table_of_reports_matches_the_metrics_page() -> None:
    """`make docs` has been run."""
    script = runpy.run_path(str(ROOT / "scripts" / "metrics_table.py"))
    assert script["TABLE"].read_text(encoding="utf-8") == script["table"]()


# -- the page ---------------------------------------------------------------------------------------------------------


def test_hostile_texts_are_data(tmp_path: Path) -> None:
    run = plant(tmp_path / "<b>a", settings={"model": {"path": HOSTILE}}, curves={**HEALTHY, f"own/{HOSTILE}": float})
    dump(run)
    record(run)
    page = page_of(read_runs([run]))
    assert not [text for text in ("<script>alert", "<img", "<b>a") if text in page]
    assert page.count("<script") == page.count("</script>") == 2
    assert HOSTILE in json.dumps(data_of(page), ensure_ascii=False).replace('\\"', '"')


def test_audit_is_shown(tmp_path: Path) -> None:
    audited, other = plant(tmp_path / "a"), plant(tmp_path / "b")
    (audited / "audit.json").write_text(json.dumps({"page": ["audit of a", HOSTILE]}))
    assert data_of(page_of(read_runs([audited, other])))["audits"] == [f"audit of a\n{HOSTILE}", ""]


def test_page_asks_no_network(tmp_path: Path) -> None:
    """Its policy allows only its own program and styles."""
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


def test_page_of_long_run_is_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = ", ".join(f'"actor/number_{number}": 0.123456789' for number in range(3))
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {step}, {line}}}\n' for step in range(1, 100_001)))
    dump(tmp_path, response="x" * 6000, count=200)
    assert len(page_of(read_runs([tmp_path])).encode()) < MAX_BYTES
    runs = read_runs([plant(tmp_path / "a", steps=900)])
    whole = len(page_of(runs).encode())
    monkeypatch.setattr(content, "MAX_BYTES", whole - 20_000)
    assert len(page_of(runs).encode()) < whole - 20_000, "its curves are coarser"


def test_command_writes_the_page_into_the_run(tmp_path: Path) -> None:
    run = plant(tmp_path / "a")
    result = CliRunner().invoke(app, ["report", str(run)])
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == str(run / "report.html")
    assert sorted(path.name for path in run.iterdir()) == ["config.yaml", "metrics.jsonl", "report.html"]
    refused = CliRunner().invoke(app, ["report", str(run), "--out", "page.png"])
    assert isinstance(refused.exception, UserError)
    assert "must end in .html" in str(refused.exception)
