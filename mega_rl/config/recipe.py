"""Reading a recipe file: YAML without surprises."""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from mega_rl.config.packaged import locate
from mega_rl.config.values import shown
from mega_rl.errors import UserError

# YAML 1.1 reads 1e-6 as a text (it wants 1.0e-6) and 2026-01-01 as a date; recipes mean a number and a text.
_FLOAT = re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$")
_DROPPED_TAGS = {"tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:float"}


class _RecipeLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, which YAML would let the last one win, and repetition of a part.

    A few lines of anchors and aliases can stand for more than a memory holds.
    """

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            line = f"line {event.start_mark.line + 1}"
            raise UserError(f"{line}: anchors (&) and aliases (*) are not read: {shown(event.anchor)}; write it out")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            line, name = key.start_mark.line + 1, key.value
            if not isinstance(name, str):
                continue
            if name in seen:
                raise UserError(f"line {line}: {shown(name)} is given twice (first in line {seen[name]}); keep one")
            seen[name] = line
        return super().construct_mapping(node, deep=deep)


_RecipeLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _DROPPED_TAGS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
# after the int resolver, so that 12 stays a whole number
_RecipeLoader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def parse_yaml(text: str) -> Any:
    """The value a YAML text stands for. Raises UserError naming the line."""
    try:
        # a SafeLoader: builds plain Python values and nothing else
        return yaml.load(text, Loader=_RecipeLoader)
    except yaml.YAMLError as error:
        mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
        problem = error.problem if isinstance(error, yaml.MarkedYAMLError) else str(error).splitlines()[0]
        where = f"line {mark.line + 1}: " if mark else ""
        raise UserError(f"{where}not valid YAML: {problem}") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"not valid YAML: {type(error).__name__}") from error


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
    if not isinstance(content, dict):
        kind = "empty" if content is None else f"a {type(content).__name__}"
        raise UserError(f"recipe {path}: is {kind}; it must hold sections such as 'model:' with 'key: value' lines")
    return content
