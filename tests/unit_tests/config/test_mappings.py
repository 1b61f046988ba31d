"""Settings that are mappings: data.chat.template_kwargs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mega_rl.config.loader import load
from mega_rl.errors import UserError

KEY = "data.chat.template_kwargs"
RECIPE = "data:\n  chat:\n    template: true\n    template_kwargs:\n      enable_thinking: false\n      depth: 2\n"


def mapping(*overrides: str, recipe: bool = False) -> dict[str, Any]:
    if recipe:
        Path("recipe.yaml").write_text(RECIPE)
    return load(Path("recipe.yaml") if recipe else None, overrides).data.chat.template_kwargs


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_recipe_and_arguments_make_one_mapping() -> None:
    assert mapping() == {}
    assert mapping(recipe=True) == {"enable_thinking": False, "depth": 2}
    assert mapping(f"{KEY}.depth=3", f"{KEY}.tools=[{{name: add}}]", recipe=True) == {
        "enable_thinking": False,
        "depth": 3,
        "tools": [{"name": "add"}],
    }
    assert mapping(f"{KEY}.depth=null", recipe=True) == {"enable_thinking": False}
    assert mapping(f"{KEY}=null", recipe=True) == {}
    assert mapping(f"{KEY}={{a: 1}}", recipe=True) == {"a": 1}
    assert mapping(f'{KEY}={{"a": null, "b": "${{x}}"}}', f"{KEY}.c=1e-3") == {"a": None, "b": "${x}", "c": 0.001}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (f"{KEY}=true", "needs a mapping of names to values; write it as {name: value}"),
        (f"{KEY}=[a]", "needs a mapping"),
        (f"{KEY}={{1: a}}", "1 is not a name"),
        (f"{KEY}.a.b=1", "unknown key"),
        (f"{KEY}.a-b=1", "'a-b' is not a name"),
        (f"{KEY}.a=.inf", "the value of a must be made of texts, finite numbers"),
    ],
)
def test_what_is_no_mapping(override: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        load(None, [override])
    (line,) = str(caught.value).splitlines()
    assert line.startswith(KEY)
    assert words in line


def test_weights_are_numbers() -> None:
    url = ("reward.source=http", "reward.source.url=http://127.0.0.1:1/")
    assert load(None, [*url, "reward.weights.form=2", "reward.weights.right=0.5"]).reward.weights == {
        "form": 2.0,
        "right": 0.5,
    }
    for value in ("true", "a", "[1]", ".nan"):
        with pytest.raises(UserError, match=r"reward\.weights=.*the value of form must be"):
            load(None, [*url, f"reward.weights.form={value}"])
