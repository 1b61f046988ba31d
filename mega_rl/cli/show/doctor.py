"""`mega-rl doctor`: this machine, or a run. Imports torch only to look at the machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mega_rl.errors import UserError
from mega_rl.operations.diagnosis.overview import overview


def doctor(
    run: Annotated[
        Path | None,
        typer.Option("--run", help="Folder of a run: show its ranks while it lives, else its newest report."),
    ] = None,
    stacks: Annotated[bool, typer.Option("--stacks", help="With --run: stacks of the ranks on this machine.")] = False,
    require: Annotated[
        str | None,
        typer.Option(
            "--require", metavar="NAME,...", help="Instead fail with a line for each of these that is missing: te,cuda."
        ),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Also list the changes that make Megatron-Core run without CUDA.")
    ] = False,
) -> None:
    """List versions, devices and optional packages, and what is used where one is missing; or look at a run.

    With --run the exit code is 1 if the run's last end was a hang or a failure.
    """
    if run is not None:
        if require is not None:
            raise UserError("--require and --run: one looks at this machine, the other at a run; give one of them")
        lines, code = overview(run, stacks=stacks)
        for line in lines:
            typer.echo(line)
        raise typer.Exit(code)
    if stacks:
        raise UserError("--stacks: shows the ranks of a run; give its folder with --run")
    from mega_rl.cli.doctor import missing, report

    if require is not None:
        lines = list(missing([name for name in require.replace(" ", "").split(",") if name]))
        typer.echo("\n".join(lines) or f"all there: {require}")
        raise typer.Exit(1 if lines else 0)
    for line in report(verbose=verbose):
        typer.echo(line)
