from __future__ import annotations

import dataclasses
import io
import re
from pathlib import Path

import pytest

from mega_rl.config.choices import CHOICES
from mega_rl.config.keys import FIELDS
from mega_rl.config.loader import load
from mega_rl.config.render import config_markdown, print_config, resolved_yaml

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    "run_dir", ["runs/a b", "1e5", "2026-01-01", "null", "x: # y", "'quoted'", "ends in \\", "line\nbreak", "ünï", ""]
)
def test_resolved_yaml_reads_back_equal(tmp_path: Path, run_dir: str) -> None:
    config = load(None, ["data.train_files=['1e5', b.jsonl]", "optim.lr=1.25e-7", "engine.megatron.tp=2"])
    config = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, run_dir=run_dir))
    path = tmp_path / "config.yaml"
    path.write_text(resolved_yaml(config))
    assert load(path, []) == config
    assert "#" not in resolved_yaml(load(None, []))


def test_print_config_marks_what_differs(tmp_path: Path) -> None:
    written = io.StringIO()
    print_config(load(None, ["optim.lr=2e-6", "data.train_files=[a.jsonl]", "engine.megatron.tp=1"]), written)
    marked = [line.strip() for line in written.getvalue().splitlines() if "# default" in line]
    assert marked == ["lr: 2.0e-06  # default: 1.0e-06", "train_files: [a.jsonl]  # default: []"]
    path = tmp_path / "config.yaml"
    path.write_text(written.getvalue())
    assert load(path, []).optim.lr == 2e-6


def test_docs_page_is_up_to_date() -> None:
    assert (ROOT / "docs/config.md").read_text() == config_markdown(), "run 'make docs'"


def test_docs_page_has_a_line_with_a_sentence_for_every_key() -> None:
    lines = re.findall(r"^- `(\w+\.[\w.]+)` \(`.*?\): (.*)$", config_markdown(), re.MULTILINE)
    assert [key for key, _ in lines] == list(FIELDS)
    assert [key for key, sentence in lines if not sentence.endswith(".")] == []


def test_docs_page_names_settings_of_every_kind() -> None:
    """A setting that several kinds share has its line at the first of them; the others name it."""
    page = config_markdown()
    for key, choice in CHOICES.items():
        section = page.partition(f"## {key}\n")[2].partition("\n## ")[0]
        for name, area in choice.builtin.items():
            entry = section.partition(f"- **{name}**: ")[2].partition("\n- **")[0]
            fields = getattr(area, "__dataclass_fields__", {})
            assert [field for field in fields if fields[field].metadata and f"`{field}`" not in entry] == [], (
                key,
                name,
            )
