"""Table of the models of a run and how they run, shown once before the first step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from mega_rl.progress.terminal import standard_error

_NUMBER = "parameters"  # the column that is aligned to the right
_NOTHING = "-"  # in a cell that has nothing to say
_TITLES = ("role", "model", "family", _NUMBER, "engine", "layout", "attention", "dtype", "trains")
_UNITS = ((1_000_000_000_000, "T"), (1_000_000_000, "B"), (1_000_000, "M"), (1_000, "K"))


@dataclass(frozen=True)
class RoleFacts:
    """Model of a role, as the table shows it."""

    role: str  # "actor"
    model: str  # where it comes from: a checkpoint directory, a function, an address
    family: str = ""  # as config.json's model_type; empty for what is no model
    parameters: int | None = None  # of the whole model
    engine: str = ""  # "megatron" or "fsdp"
    layout: str = ""  # how the model is cut: "tp2 dp2"
    attention: str = ""  # what runs: "sdpa", "te: flash"
    dtype: str = ""  # in which it computes
    trains: bool = False


def show_startup(
    roles: Sequence[RoleFacts], *, prompts: str = "", stop_tokens: str = "", console: Console | None = None
) -> None:
    """Print a table of the run's roles: a frame on a terminal wide enough, else one line for each role.

    For one rank only. A column that says nothing of any role is left out. Where a terminal is too narrow, what is the
    same for all models goes into a line below, and paths get lines of their own. prompts, stop_tokens: how prompts are
    written, and what ends a response, for the last lines. console: standard error unless given.
    """
    console = console or standard_error()
    rows = [_TITLES, *(_cells(role) for role in roles)]
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    lines: list[str] = []
    if not console.is_terminal:
        lines = list(_aligned(columns))
    elif _width(columns) <= console.width:
        console.print(_framed(columns))
    else:
        lines = _narrow(columns)
    lines += [f"prompts: {prompts}"] * bool(prompts) + [f"responses end at {stop_tokens}"] * bool(stop_tokens)
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _width(columns: Sequence[Sequence[str]]) -> int:
    """Return how wide the framed table is."""
    return 1 + sum(max(map(cell_len, column)) + 3 for column in columns)


def _narrow(columns: Sequence[Sequence[str]]) -> list[str]:
    """Return the table as lines for a narrow terminal."""
    models = [row for row in range(1, len(columns[0])) if any(c[row] for c in columns if c[0] == "family")]
    shared = {
        title: cells[models[0] - 1]
        for title, *cells in columns
        if title not in ("role", "model") and len(models) > 1 and len({cells[row - 1] for row in models}) == 1
    }
    kept = [column for column in columns if column[0] != "model" and column[0] not in shared]
    lines = list(_aligned(kept))
    paths = next(column for column in columns if column[0] == "model")
    with_paths = [lines[0]]
    for line, path in zip(lines[1:], paths[1:], strict=True):
        with_paths += [line, f"  {path}"]
    if shared:
        with_paths.append("all models: " + ", ".join(f"{title} {text}" for title, text in shared.items() if text))
    return with_paths


def _framed(columns: Sequence[Sequence[str]]) -> Table:
    """Return a table of columns, each of a title and its cells."""
    table = Table(*(Column(title, justify="right" if title == _NUMBER else "left") for title, *_ in columns))
    for row in list(zip(*columns, strict=True))[1:]:
        table.add_row(*(Text(cell or _NOTHING, overflow="fold") for cell in row))
    return table


def _aligned(columns: Sequence[Sequence[str]]) -> Iterator[str]:
    """Return plain lines of the table, columns padded to equal widths."""
    widths = [max(map(len, column)) for column in columns]
    for row in zip(*columns, strict=True):
        cells = [
            (cell or _NOTHING).rjust(width) if title == _NUMBER else (cell or _NOTHING).ljust(width)
            for cell, width, (title, *_) in zip(row, widths, columns, strict=True)
        ]
        yield "  ".join(cells).rstrip()


def short_count(number: int) -> str:
    """ "494M" or "7.62B": three digits."""
    for size, unit in _UNITS:
        if number >= size - size // 2000:  # from there on it is rounded up to 1
            digits = number / size
            return f"{digits:.{2 if digits < 9.995 else 1 if digits < 99.95 else 0}f}{unit}"
    return str(number)


def _cells(role: RoleFacts) -> tuple[str, ...]:
    parameters = "" if role.parameters is None else short_count(role.parameters)
    return (
        *(role.role, role.model, role.family, parameters, role.engine, role.layout, role.attention, role.dtype),
        "yes" if role.trains else "no",
    )
