"""Read YAML with OmegaConf: recipes and values of overrides, without anchors, tags, or keys given twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mega_rl.config.packaged import locate
from mega_rl.config.values import shown
from mega_rl.errors import UserError


def parse_yaml(text: str) -> Any:
    """Return the mapping or list that a YAML text stands for. Raises UserError naming the line."""
    return _parsed(text, lambda: OmegaConf.create(text))


def parse_value(text: str) -> Any:
    """Return the value of an override's text. Raises UserError."""
    return _parsed(text, lambda: OmegaConf.from_dotlist([f"value={text}"]))["value"]


def _parsed(text: str, create: Any) -> Any:
    """Return plain Python values of what OmegaConf creates from a text. Raises UserError."""
    try:
        for event in yaml.parse(text):
            # A few lines of anchors and aliases can stand for more than a memory holds.
            if anchor := getattr(event, "anchor", None):
                line = 1 + (event.start_mark.line if event.start_mark else 0)
                raise UserError(f"line {line}: anchors (&) and aliases (*) are not read: {shown(anchor)}; write it out")
        return OmegaConf.to_container(create())
    except yaml.MarkedYAMLError as error:
        where = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        problem = str(error.problem)
        if problem.startswith("found duplicate key"):
            raise UserError(
                f"{where}{problem.removeprefix('found duplicate key ')} is given twice; keep one"
            ) from error
        raise UserError(f"{where}not valid YAML: {problem}") from error
    except OmegaConfBaseException:
        raise UserError("only ${section.key} references are allowed; write the value") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"not valid YAML: {str(error).splitlines()[0] or type(error).__name__}") from error


def read_recipe(recipe: Path) -> dict[str, Any]:
    """Return sections and keys of a recipe: a file, or the name of a packaged one. Raises UserError."""
    path = locate(recipe)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"recipe {path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except OSError as error:
        raise UserError(f"recipe {shown(str(path))} cannot be read: {error.strerror}") from None
    try:
        content = parse_yaml(text)
    except UserError as error:
        raise UserError(f"recipe {path}: {error}") from error
    if not isinstance(content, dict) or not content:
        kind = f"a {type(content).__name__}" if content else "empty"
        raise UserError(f"recipe {path}: is {kind}; it must hold sections such as 'model:' with 'key: value' lines")
    return content
