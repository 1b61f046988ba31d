"""Help and output of commands: whole summaries, progress, tables, text, and JSON that every reader takes."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

from mega_rl.tracking import progress

SHOWN = 20  # names listed of each kind; --json has them all


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "") -> None:
    """Print a title and, indented below it, a table."""
    if title:
        typer.echo(title)
    for line in progress.aligned(columns, [*rows]):
        typer.echo(f"  {line}")


def print_json(facts: object) -> None:
    """Print an object as JSON: null for non-finite numbers, text for other types."""
    typer.echo(json.dumps(plain(facts), default=str))


def plain(value: Any) -> Any:
    """Return a value of JSON's types with null for numbers that are not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    return value


def show(facts: object, lines: Iterable[str], *, as_json: bool) -> None:
    """Print the facts as JSON, or else the lines."""
    if as_json:
        print_json(facts)
        return
    for line in lines:
        typer.echo(line)


def names_line(label: str, names: Sequence[str]) -> Iterator[str]:
    """Yield a line with a label and a list's first names, if it has any."""
    if names:
        more = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
        yield f"{label} ({len(names):,}): {', '.join(names[:SHOWN])}{more}"


@contextmanager
def showing() -> Iterator[None]:
    """Show the block's progress, after the imports that it begins with."""
    progress.show_progress()
    with progress.phase("importing PyTorch"):
        yield


@dataclass(frozen=True)
class Later:
    """A command, or group of commands, whose module is imported when it is called."""

    section: str  # heading in the help
    name: str
    place: str  # "module:name" of a function or a `Commands` in mega_rl.cli
    summary: str

    def load(self) -> Any:
        """Import the module and return the command."""
        module, _, name = self.place.partition(":")
        command = getattr(importlib.import_module(f"mega_rl.cli.{module}"), name)
        if not isinstance(command, typer.Typer):
            function, command = command, Commands()
            command.command(self.name)(function)
        return typer.main.get_command(command)


class _Group(TyperGroup):
    """A group whose help shows whole summaries; without a command it shows its help."""

    later: ClassVar[Sequence[Later]] = ()

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for one in self.later:  # the help needs no more
            self.add_command(TyperCommand(name=one.name, help=one.summary, rich_help_panel=one.section))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Import the module of the command that is called."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, next((one.load() for one in self.later if one.name == name), command), rest

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write each command with the whole first sentence of its help."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            title = getattr(command, "rich_help_panel", None) or "Commands"
            sections.setdefault(title, []).append((name, summary(command.help)))
        width = max(map(len, self.commands))
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl([(f"{name:{width}}", text) for name, text in rows])

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take no arguments for --help, unless the group itself is a command."""
        return super().parse_args(ctx, args or ([] if self.invoke_without_command else ["--help"]))


def summary(text: str | None) -> str:
    """Return the first sentence of a help."""
    first = " ".join((text or "").split("\n\n")[0].split())
    return first.partition("; ")[0].removesuffix(".") + "."


class Commands(typer.Typer):
    """A `typer.Typer` with this form of help, without typer's own rendering of errors."""

    def __init__(
        self, *, name: str | None = None, help: str | None = None, completion: bool = False, later: Sequence[Later] = ()
    ) -> None:
        """completion: adds options for the shell's completion. later: commands to import when they are called."""
        super().__init__(
            name=name,
            help=help,
            cls=type("Group", (_Group,), {"later": later}),
            add_completion=completion,
            context_settings={"help_option_names": ["-h", "--help"]},
            rich_markup_mode=None,
            pretty_exceptions_enable=False,
        )
