"""A config in words: resolved YAML, differences from defaults, and the reference page of all keys."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

import yaml

from mega_rl.config.choices import CHOICES
from mega_rl.config.keys import FIELDS, NAMES, SECTIONS, flat, keys_in, recorded
from mega_rl.config.packaged import parse_value
from mega_rl.config.schema import Config
from mega_rl.config.setting import Kind
from mega_rl.config.values import describe_range


def resolved_yaml(config: Config) -> str:
    """Return the config as YAML that `load` reads back equal; Hub names carry their commits."""
    return "\n".join(_section_lines(recorded(config), mark_changes=False)) + "\n"


def print_config(config: Config, file: TextIO | None = None) -> None:
    """Write the whole config as YAML with comments on lines that differ from the default."""
    (file or sys.stdout).write("\n".join(_section_lines(config, mark_changes=True)) + "\n")


def config_markdown() -> str:
    """The text of docs/config.md."""
    lines = [Path(__file__).with_name("page.md").read_text(encoding="utf-8")]
    for section, area in SECTIONS.items():
        summary = (area.__doc__ or "").strip().partition("\n")[0]
        lines += [f"## {section}", "", summary, ""]
        lines += [_row(key, flat(Config())[key], FIELDS[key]) for key in keys_in(section)] + [""]
    for key, choice in CHOICES.items():
        lines += [f"## {key}", "", *_kind_lines(choice.builtin), ""]
    return "\n".join(lines)


def _kind_lines(kinds: Mapping[str, type[Kind]]) -> list[str]:
    """Return a tagged section's kinds with their settings; a repeated setting only names its first kind."""
    lines: list[str] = []
    owners: dict[str, str] = {}  # first kind that has a row
    for kind, area in kinds.items():
        settings: Iterable[dataclasses.Field[Any]] = getattr(area, "__dataclass_fields__", {}).values()
        rows = {field.name: "  " + _row(field.name, field.default, field) for field in settings if field.metadata}
        shared: dict[str, list[str]] = {}
        for name, row in rows.items():
            if owners.setdefault(row, kind) != kind:
                shared.setdefault(owners[row], []).append(f"`{name}`")
        also = "".join(f" As {owner}: {', '.join(names)}." for owner, names in shared.items())
        lines.append(f"- **{kind}**: {(area.__doc__ or '').strip().partition(chr(10))[0]}{also}")
        lines += [row for row in rows.values() if owners[row] == kind]
    return lines


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


def _row(name: str, default: object, field: dataclasses.Field[Any]) -> str:
    """Return the reference of one setting: name, default, range, meaning."""
    default = default["name"] if isinstance(default, dict) and field.metadata["kinds"] else default
    value = "; ".join(filter(None, (f"`{_scalar(default)}`", _legal(field).removeprefix("named "))))
    return f"- `{name}` ({value}): {field.metadata['doc']}"


def _legal(field: dataclasses.Field[Any]) -> str:
    """Return a field's legal values for the page: '≥ 1 ranks', '0 to 1', 'bf16, fp32'."""
    words = {"one of ": "", "above": ">", "at least": "≥", "at most": "≤"}
    legal = describe_range(field)
    for word, sign in words.items():
        legal = legal.replace(word, sign)
    legal = re.sub(r"≥ (\S+) and ≤", r"\1 to", legal)
    return f"{legal} {field.metadata['unit']}".strip()


if __name__ == "__main__":
    sys.stdout.write(config_markdown())
