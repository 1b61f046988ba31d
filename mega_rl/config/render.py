"""A config in words: resolved YAML, what differs from the defaults, and the reference page of every key."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import TextIO

import yaml

from mega_rl.config.keys import FIELDS, NAMES, SECTIONS, TYPES, flat, keys_in
from mega_rl.config.origins import recorded
from mega_rl.config.plugins.choices import ALGORITHM_CHOICES
from mega_rl.config.recipe import parse_yaml
from mega_rl.config.schema import Config
from mega_rl.config.values import describe_range

_INTRO = """# Configuration

Every key a recipe or a `key=value` argument may set. This page is generated from `mega_rl/config/schema/` by
`make docs`.

A run's settings are the defaults below, then the recipe (`--config`, a file or the name of a packaged recipe), then
arguments such as `optim.lr=2e-6 data.train_files=[a.jsonl,b.jsonl]`; the last one wins. `key=null` (or `~key`, or
`key:` without a value in a recipe) restores a default. A list of one needs no brackets. A value may refer to another as
`${trainer.prompts_per_step}`. Paths are relative to the working directory, not to the recipe. In a recipe
`engine.megatron.tp=2` is

```yaml
engine:
  megatron:
    tp: 2
```

Unknown keys, values out of range and settings without effect are errors, all shown at once before anything starts. An
argument may switch off what the recipe sets: with `engine.backend=fsdp` over a recipe that has `engine.megatron.tp`,
or `trainer.steps=1` over one with a warm-up, the settings that lose their effect take their defaults, and one line of
the log names them.
`mega-rl train --config X --print-config` shows the outcome and marks what differs from the defaults.

Between keys these hold, among others: the world size is a multiple of `tp*pp*cp`, and data parallelism is the quotient;
`tp` divides the attention heads and the feed-forward size; `pp*vpp` divides the layers; `minibatch_size` divides
`prompts_per_step`, which is a multiple of the data-parallel size; a prompt of the longest length and its response fit a
packed micro-batch and the model's positions. With `vpp` above 1 the number of micro-batches of a mini-batch is a
multiple of `pp`.
"""


def resolved_yaml(config: Config) -> str:
    """Return the whole config as YAML that `load` reads back to an equal Config; Hub names stand with their commits."""
    return "\n".join(_section_lines(recorded(config), mark_changes=False)) + "\n"


def print_config(config: Config, file: TextIO | None = None) -> None:
    """Write the whole config as YAML, with a comment on each line that differs from the default."""
    (file or sys.stdout).write("\n".join(_section_lines(config, mark_changes=True)) + "\n")


def config_markdown() -> str:
    """The text of docs/config.md."""
    lines = [_INTRO]
    for section, area in SECTIONS.items():
        lines += [f"## {section}", "", (area.__doc__ or "").strip(), "", *_table(keys_in(section))]
    for choice in ALGORITHM_CHOICES:
        lines += [f"## Choices of {choice.key}", "", "When to take which: [algorithms](algorithms.md).", ""]
        lines += ["| choice | setting | default | legal | meaning |", "|---|---|---|---|---|"]
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
    text = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), allow_unicode=True)
    text = text.removesuffix("\n").removesuffix("\n...")
    # The text "1e5" needs quotes for our reader, a line break an escape: JSON has both.
    return text if "\n" not in text and parse_yaml(text) == value else json.dumps(value)


def _row(key: str) -> str:
    field, hint = FIELDS[key], TYPES[key]
    kind = str(hint) if not isinstance(hint, type) or hint is list else hint.__name__
    kind = "mapping" if kind.startswith("dict") else kind
    unit = field.metadata["unit"]
    legal = describe_range(field) + (f" ({unit})" if unit else "")
    cells = (f"`{key}`", kind, f"`{_scalar(flat(Config())[key])}`", legal.strip(), field.metadata["doc"])
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    sys.stdout.write(config_markdown())
