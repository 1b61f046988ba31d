"""Output of commands: progress, tables, text, and JSON without numbers that JSON cannot hold."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer

from mega_rl.tracking import progress

SHOWN = 20  # names listed of each kind; --json has them all
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
    """Print an object as JSON: null for a number that is not finite, text for other types."""
    typer.echo(json.dumps(_plain(facts), default=str))


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value


def is_main() -> bool:
    """Return whether this process prints: rank 0."""
    return os.environ.get("RANK", "0") == "0"


def show(facts: object, lines: Iterable[str], *, as_json: bool) -> None:
    """Print, on rank 0, the facts as JSON or else the lines."""
    if is_main() and as_json:
        print_json(facts)
    elif is_main():
        for line in lines:
            typer.echo(line)


def names_line(label: str, names: Sequence[str]) -> Iterator[str]:
    """Yield a line with a label and the first names of a list, if it has any."""
    if names:
        more = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
        yield f"{label} ({len(names):,}): {', '.join(names[:SHOWN])}{more}"


@contextmanager
def showing(label: str = "importing PyTorch") -> Iterator[None]:
    """Show the block's progress on rank 0's terminal; `label` while nothing can be counted."""
    progress.show_progress()
    with progress.phase(label):
        yield
