"""The form of every command's help: summaries whole, arguments without the names of Python's types, -h as --help."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


class _Command(TyperCommand):
    """A command whose arguments are shown as they are written."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and then the options."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            name, text = record
            if parameter.param_type_name == "argument":
                name = name.partition(" <")[0]
            name = name.replace("<int range>", "<int>").replace("<float range>", "<float>")
            sections["Arguments" if parameter.param_type_name == "argument" else "Options"].append((name, text))
        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


class _Group(TyperGroup):
    """Commands whose summaries are not cut off; called without a command it shows its help."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write each command with the whole first sentence of its help."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, _summary(command)) for name, command in commands if command is not None and not command.hidden]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take no arguments for --help, unless the group does something by itself."""
        return super().parse_args(ctx, args or ([] if self.invoke_without_command else ["--help"]))


def _summary(command: Any) -> str:
    text = " ".join((command.help or "").split("\n\n")[0].split())
    return text.partition("; ")[0].removesuffix(".") + "."


class Commands(typer.Typer):
    """A `typer.Typer` with this form of help, without typer's own rendering of errors."""

    def __init__(self, *, name: str | None = None, help: str | None = None, completion: bool = False) -> None:
        """completion: whether there are options that install and show the shell's completion."""
        super().__init__(
            name=name,
            help=help,
            cls=_Group,
            add_completion=completion,
            context_settings={"help_option_names": ["-h", "--help"]},
            rich_markup_mode=None,
            pretty_exceptions_enable=False,
        )

    def command(self, name: str | None = None, **settings: Any) -> Any:
        """Return a decorator that makes a command of a function, as typer's."""
        return super().command(name, cls=_Command, **settings)
