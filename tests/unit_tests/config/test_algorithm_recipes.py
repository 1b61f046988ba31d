"""Recipes by override on docs/algorithms.md: each loads, and makes what it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mega_rl.config.choices import ADVANTAGE, CORRECTION, LOSS, Choice
from mega_rl.config.loader import load
from mega_rl.config.rules import check
from mega_rl.trainer.assemble.algorithms import choose_method

PAGE = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text(encoding="utf-8")
RECIPES = dict(re.findall(r"^\| ([^|`]+) \| `([^`|]+=[^`|]+)` \|$", PAGE, re.MULTILINE))


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_breaks_no_rule_and_is_built(name: str) -> None:
    config = load(None, RECIPES[name].split())
    assert check(config, world_size=1) == []
    choose_method(config)


@pytest.mark.parametrize("choice", [ADVANTAGE, LOSS, CORRECTION])
def test_the_page_says_when_to_take_each_choice(choice: Choice) -> None:
    beginnings = re.findall(r"^(?:\| `.*? \||- \*\*`.*?\*\*(?:, \*\*`.*?\*\*)*)", PAGE, re.MULTILINE)
    named = {name for text in beginnings for name in re.findall(r"`(\w+)`", text)}
    assert named >= set(choice.builtin) - {"none"}


def test_every_estimator_has_a_recipe() -> None:
    chosen = {load(None, overrides.split()).algorithm.advantage.name for overrides in RECIPES.values()}
    assert chosen >= set(ADVANTAGE.builtin)
