"""Recipes and tables of the package by name; reading a recipe or value as YAML."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mega_rl.config.values import ONLY_REFERENCES, shown
from mega_rl.errors import UserError

FOLDER = Path(__file__).parent / "recipes"
SUFFIX = ".yaml"


def names() -> list[str]:
    """Return the names of all packaged recipes, sorted."""
    return sorted(path.stem for path in FOLDER.glob(f"*{SUFFIX}"))


def rows_of(table: str) -> list[list[str]]:
    """Return the cells of each row of a tab-separated table in this folder."""
    return [line.split("\t") for line in Path(__file__).with_name(table).read_text(encoding="utf-8").splitlines()]


def file_of(name: str) -> Path:
    """Return the file of a packaged recipe, named with or without `.yaml`. Raises UserError: unknown name."""
    stem = name.removesuffix(SUFFIX)
    if stem in names():
        return FOLDER / f"{stem}{SUFFIX}"
    near = difflib.get_close_matches(Path(stem).name, names(), n=1, cutoff=0.5)
    guess = f"did you mean {near[0]}? " if near else ""
    raise UserError(f"no packaged recipe {shown(name)}; {guess}packaged recipes: {', '.join(names())}")


def locate(recipe: Path) -> Path:
    """Return the file that `--config` means: first a user's path, then a packaged recipe's name.

    Raises UserError, naming the packaged recipes, where it is neither.
    """
    if recipe.exists():
        return recipe
    try:
        return file_of(str(recipe))
    except UserError as error:
        hint = str(error).partition("; ")[2]
        raise UserError(
            f"recipe {shown(str(recipe))} does not exist, as a file or as a packaged recipe; {hint}"
        ) from None


def summary(recipe: Path) -> str:
    """Return the first sentence of a recipe's head comment, "" without one."""
    head: list[str] = []
    for line in recipe.read_text(encoding="utf-8").splitlines():
        if not line.startswith("# ") or line.startswith("#  "):
            break
        head.append(line.removeprefix("# "))
    sentence, stop, _ = " ".join(head).partition(". ")
    return f"{sentence}." if stop else sentence


def parse_yaml(text: str) -> Any:
    """Return the mapping or list that a YAML text stands for. Raises UserError naming the line."""
    return _parsed(text, lambda: OmegaConf.create(text))


def parse_value(text: str) -> Any:
    """Return the value of an override's text. Raises UserError."""
    return _parsed(text, lambda: OmegaConf.from_dotlist([f"value={text}"]))["value"]


def _parsed(text: str, create: Callable[[], Any]) -> Any:
    """Return plain Python values of what OmegaConf creates from a text. Raises UserError."""
    try:
        # A few lines of anchors and aliases can stand for more than a memory holds.
        anchor = next((event for event in yaml.parse(text) if getattr(event, "anchor", None)), None)
        if anchor is None:
            return OmegaConf.to_container(create())
    except OmegaConfBaseException:
        raise UserError(ONLY_REFERENCES) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        problem = str(getattr(error, "problem", None) or str(error).partition("\n")[0] or type(error).__name__)
        twice = problem.removeprefix("found duplicate key ")
        what = f"not valid YAML: {problem}" if twice == problem else f"{twice} is given twice; keep one"
        raise UserError(f"{where}{what}") from error
    line = 1 + anchor.start_mark.line if anchor.start_mark else 1
    raise UserError(f"line {line}: anchors (&) and aliases (*) are not read; write it out")


def read_recipe(recipe: Path) -> dict[str, Any]:
    """Return a recipe's sections and keys, from its file or packaged name. Raises UserError."""
    path = locate(recipe)
    try:
        content = parse_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"recipe {path} cannot be read: {error.strerror}") from None
    except ValueError as error:  # also text that is not UTF-8
        raise UserError(f"recipe {path}: {error}") from error
    if not isinstance(content, dict) or not content:
        kind = f"a {type(content).__name__}" if content else "empty"
        raise UserError(f"recipe {path}: is {kind}; it must hold sections such as 'model:' with 'key: value' lines")
    return content
