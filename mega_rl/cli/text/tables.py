"""Output of commands: tables, and JSON without numbers that JSON cannot hold."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

import typer

WIDTH = 200  # columns of a table that does not go to a terminal


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "", last: Sequence[str] = ()
) -> None:
    """Print a table. last: cells of one more row, under a line."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns, box=box.SIMPLE_HEAD, title=title or None, title_justify="left")
    for row in rows:
        table.add_row(*row)
    if last:
        table.add_section()
        table.add_row(*last)
    Console(width=None if Console().is_terminal else WIDTH, markup=False, highlight=False).print(table)


def print_json(facts: object) -> None:
    """Print an object as JSON; a number that is not finite is null."""
    typer.echo(json.dumps(_plain(facts)))


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value
