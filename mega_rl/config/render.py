"""A config in words: resolved YAML, what differs from the defaults, and the reference page of every key."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import yaml

from mega_rl.config.choices import CHOICES
from mega_rl.config.keys import FIELDS, NAMES, SECTIONS, TYPES, flat, keys_in
from mega_rl.config.origins import recorded
from mega_rl.config.recipe import parse_value
from mega_rl.config.schema import Config
from mega_rl.config.values import describe_range


def resolved_yaml(config: Config) -> str:
    """Return the whole config as YAML that `load` reads back to an equal Config; Hub names stand with their commits."""
    return "\n".join(_section_lines(recorded(config), mark_changes=False)) + "\n"


def print_config(config: Config, file: TextIO | None = None) -> None:
    """Write the whole config as YAML, with a comment on each line that differs from the default."""
    (file or sys.stdout).write("\n".join(_section_lines(config, mark_changes=True)) + "\n")


def config_markdown() -> str:
    """The text of docs/config.md."""
    lines = [Path(__file__).with_name("page.md").read_text(encoding="utf-8")]
    for section, area in SECTIONS.items():
        lines += [f"## {section}", "", (area.__doc__ or "").strip(), "", *_table(keys_in(section))]
    for key, choice in CHOICES.items():
        guide = ["When to take which: [algorithms](algorithms.md).", ""] * key.startswith("algorithm.")
        lines += [
            f"## {key}",
            "",
            *guide,
            "| name | setting | default | legal | meaning |",
            "|---|---|---|---|---|",
        ]
        lines += [row for name, area in choice.builtin.items() for row in _choice_rows(name, area)] + [""]
    return "\n".join(lines)


def _choice_rows(name: str, area: type) -> list[str]:
    """Return the rows of a built-in choice: one for each of its settings, or one without."""
    summary = (area.__doc__ or "").strip().partition("\n")[0]
    rows = [
        (f"`{field.name}`", f"`{_scalar(field.default)}`", describe_range(field), field.metadata["doc"])
        for field in dataclasses.fields(area)
    ]
    return [
        f"| **{name}** | | | | {summary} |",
        *("| | " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows),
    ]


def _table(keys: Sequence[str]) -> list[str]:
    """Return the reference of some keys."""
    head = ["| key | type | default | legal | meaning |", "|---|---|---|---|---|"]
    return [*head, *map(_row, keys), ""]


def _section_lines(config: Config, *, mark_changes: bool) -> list[str]:
    values, defaults = flat(config), flat(Config())
    lines: list[str] = []
    for key in NAMES:
        indent, name = "  " * key.count("."), key.rpartition(".")[2]
        if key in SECTIONS:
            lines.append(f"{indent}{name}:")
            continue
        line = f"{indent}{name}: {_scalar(values[key])}"
        changed = mark_changes and values[key] != defaults[key]
        lines.append(f"{line}  # default: {_scalar(defaults[key])}" if changed else line)
    return lines


def _scalar(value: object) -> str:
    """One-line YAML of a value."""
    value = json.loads(json.dumps(value))  # without parts that are one object, for which YAML writes aliases
    text = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), allow_unicode=True, sort_keys=False)
    text = text.removesuffix("\n").removesuffix("\n...")
    # The text "1e5" needs quotes for our reader, a line break an escape: JSON has both.
    return text if "\n" not in text and parse_value(text) == value else json.dumps(value)


def _row(key: str) -> str:
    field, hint = FIELDS[key], TYPES[key]
    kind = str(hint) if not isinstance(hint, type) or hint is list else hint.__name__
    kind = "section" if field.metadata["kinds"] else kind
    kind = "mapping" if kind.startswith("dict") else kind
    unit = field.metadata["unit"]
    legal = describe_range(field) + (f" ({unit})" if unit else "")
    cells = (f"`{key}`", kind, f"`{_scalar(flat(Config())[key])}`", legal.strip(), field.metadata["doc"])
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    sys.stdout.write(config_markdown())
