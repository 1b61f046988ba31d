"""Settings of a mixture: entries of the right types, one way to say the shares, nothing without effect."""

from __future__ import annotations

from pathlib import Path

import pytest

from mega_rl.config.loader import load
from mega_rl.config.render import resolved_yaml
from mega_rl.config.rules import check
from mega_rl.errors import UserErrors

KEY = "data.mixture.sources"
TWO = (f"{KEY}.math={{files: m.jsonl}}", f"{KEY}.code={{files: [c.jsonl]}}")
WEIGHTED = (f"{KEY}.math={{files: m.jsonl, weight: 3}}", f"{KEY}.code={{files: [c.jsonl], weight: 0.5}}")


def broken(*overrides: str) -> list[str]:
    """Return what is wrong with a mixture."""
    try:
        config = load(None, overrides)
    except UserErrors as error:
        return list(error.problems)
    return [line for line in check(config, world_size=1) if "mixture" in line]


def test_sources_are_read_and_written() -> None:
    config = load(None, WEIGHTED)
    named = config.data.mixture.named()
    assert named["math"].files == ["m.jsonl"]
    assert (named["math"].weight, named["code"].weight) == (3.0, 0.5)
    assert config.data.mixture.files() == ["m.jsonl", "c.jsonl"]
    assert broken(*WEIGHTED) == broken(*TWO, "data.mixture.temperature=2") == []
    Path("again.yaml").write_text(resolved_yaml(config), encoding="utf-8")
    assert load(Path("again.yaml")) == config


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ((f"{KEY}.math=m.jsonl",), f"{KEY}.math='m.jsonl': needs a mapping, as {{files: [train.jsonl], weight: 1}}"),
        ((f"{KEY}.math={{weight: 1}}",), f"{KEY}.math: has no files; name at least one JSONL or Parquet file"),
        ((f"{KEY}.math={{files: []}}",), f"{KEY}.math: has no files; name at least one JSONL or Parquet file"),
        ((f"{KEY}.math={{files: a, weigth: 1}}",), f"{KEY}.math.weigth: unknown setting of a source; legal: files, "),
        ((f"{KEY}.math={{files: a, weight: 0}}",), f"{KEY}.math.weight=0: must be above 0"),
        ((f"{KEY}.math={{files: a, weight: -1}}",), f"{KEY}.math.weight=-1: must be above 0"),
        ((f"{KEY}.math={{files: a, weight: many}}",), f"{KEY}.math.weight='many': needs a finite number, above 0"),
        (
            (f"{KEY}={{math: {{files: a, weight: .nan}}}}",),
            f"{KEY}={{'math': {{'files': 'a', 'weight': nan}}}}: the val",
        ),
        ((*WEIGHTED, "data.mixture.temperature=2"), f"{KEY}.math.weight: shares are given by the weights of all"),
        ((TWO[0], WEIGHTED[1]), f"{KEY}.code.weight: shares are given by the weights of all"),
        ((*TWO, "data.stream.rows=8"), "data.stream.rows=8: the number of prompts is not known"),
        ((f"{KEY}.epochs={{files: a}}",), f"{KEY}.epochs: epochs is a metric of all data, data/epochs; take another"),
        ((*TWO, "data.source=rows.py:Rows"), f"{KEY} has no effect: data.source=rows.py:Rows yields the rows"),
        ((f"{KEY}.a b={{files: a}}",), f"{KEY}={{'a b': {{'files': 'a'}}}}: 'a b' is not a name"),
    ],
    ids=lambda case: case[-1] if isinstance(case, tuple) else "",
)
def test_mistakes(overrides: tuple[str, ...], problem: str) -> None:
    (line,) = broken(*overrides)
    assert line.startswith(problem)


def test_files_beside_a_mixture_have_no_effect() -> None:
    """Given together they are a mistake; those of a recipe make way for the sources of the command line."""
    lines = check(load(None, [*TWO, "data.train_files=[a.jsonl]"]), world_size=1)
    assert any(
        line.startswith("data.train_files=['a.jsonl'] has no effect: it needs data.source=files") for line in lines
    )
    Path("recipe.yaml").write_text("data: {train_files: [a.jsonl]}\n", encoding="utf-8")
    assert load(Path("recipe.yaml"), TWO).data.train_files == []


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
