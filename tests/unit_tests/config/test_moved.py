"""Earlier names of settings: each is answered with the name it has now, and nothing of ours uses one."""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from mega_rl.cli import app
from mega_rl.config.keys import FIELDS, SECTIONS, is_mapping, keys_in
from mega_rl.config.loader import load
from mega_rl.config.moved import EARLIER, REMOVED
from mega_rl.config.moved import SECTIONS as EARLIER_SECTIONS
from mega_rl.config.plugins.choices import CHOICES
from mega_rl.config.schema import Config
from mega_rl.config.schema.setting import defaults
from mega_rl.errors import UserErrors
from tests.release.sources import ROOT

OUR_FILES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "mega_rl/**/*", "benchmarks/*", "scripts/*", ".github/**/*", "Makefile")
    for path in ROOT.glob(pattern)
    if path.suffix in (".md", ".py", ".yaml", ".yml", "") and path.is_file() and path.name != "moved.py"
)
DOTTED = "|".join(sorted((re.escape(name) for name in [*EARLIER, *REMOVED] if "." in name), key=len, reverse=True))
EARLIER_NAME = re.compile(rf"(?<![\w./-])(?:{DOTTED})(?!\w)|(?<![\w.-])engine(?:=|: )(?:fsdp|megatron)")


def problems(recipe: Path | None, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(UserErrors) as caught:
        load(recipe, overrides)
    return caught.value.problems


def texts(path: Path) -> Iterator[str]:
    """Yield what a file says: of Python its strings and comments, of others all."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield text
        return
    yield from (
        node.value
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    with path.open("rb") as file:
        yield from (token.string for token in tokenize.tokenize(file.readline) if token.type == tokenize.COMMENT)


def test_every_earlier_name_leads_to_a_setting() -> None:
    assert not EARLIER.keys() & FIELDS.keys()
    now = {key for key in EARLIER.values() if not is_mapping(key.rpartition(".")[0])}
    assert now <= FIELDS.keys()
    areas = {choice.settings_key: choice.builtin.values() for choice in CHOICES}
    entries = {f"{key}.{name}" for key, builtin in areas.items() for area in builtin for name in defaults(area)}
    assert set(EARLIER.values()) - now <= entries
    assert set(EARLIER_SECTIONS.values()) <= SECTIONS.keys()
    assert not (EARLIER_SECTIONS.keys() | REMOVED.keys()) & (SECTIONS.keys() | FIELDS.keys())


@pytest.mark.parametrize("name", EARLIER)
def test_an_earlier_name_on_the_command_line_is_answered_with_todays(name: str) -> None:
    assert problems(None, f"{name}=1") == (f"{name}: this setting is now {EARLIER[name]}",)


def test_entries_of_mappings_and_what_is_gone() -> None:
    assert problems(None, "data.chat_template_kwargs.a=1", "parallel.last_stage_layers=2", "sglang=1") == (
        "data.chat_template_kwargs.a: this setting is now data.chat.template_kwargs.a",
        "parallel.last_stage_layers: this setting is gone; write the layers of every stage into "
        "engine.megatron.pipeline, as Ettt|ttt|tL",
        "sglang: this section is now rollout.sglang",
    )


def test_a_recipe_of_earlier_names_is_answered_all_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "engine: fsdp\nparallel:\n  tp: 2\n  tpp: 1\nddp: 3\ndata: {chat_template: true, shuffle: false}\n"
        "trainer.packing: true\noptim:\n  lr: 1\n"
    )
    lines = (
        "engine: this setting is now engine.backend",
        "parallel.tp: this setting is now engine.megatron.tp",
        "parallel.tpp: unknown key; did you mean engine.megatron.tp?",
        "ddp: this section is now engine.megatron.ddp",
        "data.chat_template: this setting is now data.chat.template",
        "trainer.packing: this setting is now trainer.microbatch.packing",
    )
    assert problems(recipe) == lines
    assert app.main(["train", "--config", str(recipe)]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert errors == [f"error: {line}" for line in lines]


def test_a_reference_by_an_earlier_name_says_todays() -> None:
    (line,) = problems(None, "trainer.minibatch_size=${parallel.tp}")
    assert line == (
        "trainer.minibatch_size='${parallel.tp}': refers to parallel.tp: this setting is now engine.megatron.tp"
    )


def test_a_key_without_a_value_in_a_recipe_takes_its_default(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("optim:\n  lr:\n  schedule: null\nmodel:\n  path:\nengine:\n  megatron:\n")
    assert load(recipe) == Config()


def test_misspelt_earlier_names_get_todays_as_a_suggestion() -> None:
    assert problems(None, "algorithm.kl_coeff=1", "sglang.serves=2", "engine.megatron.pipelines=2", "engine.tp=2") == (
        "algorithm.kl_coeff: unknown key; did you mean algorithm.kl.coef?",
        "sglang.serves: unknown key; did you mean rollout.sglang.server.count?",
        "engine.megatron.pipelines: unknown key; did you mean engine.megatron.pipeline?",
        "engine.tp: unknown key; did you mean engine.megatron.tp?",
    )


def test_nothing_of_ours_uses_an_earlier_name() -> None:
    assert {"config.md", "quickstart.yaml", "engines.py", "train_ppo_megatron.py"} <= {path.name for path in OUR_FILES}
    uses = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in OUR_FILES
        for text in texts(path)
        for match in EARLIER_NAME.finditer(text)
    ]
    assert uses == []


def test_a_section_has_at_most_twelve_settings() -> None:
    assert {section: len(keys_in(section)) for section in SECTIONS if len(keys_in(section)) > 12} == {}


def test_sections_come_before_what_is_in_them() -> None:
    assert all(outer != inner and not outer.startswith(f"{inner}.") for outer, inner in pairwise(SECTIONS))
