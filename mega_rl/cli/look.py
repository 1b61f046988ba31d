"""`mega-rl report` and `doctor`: runs as a page, and this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mega_rl import disk
from mega_rl.errors import UserError
from mega_rl.operations.diagnosis import overview
from mega_rl.tracking import progress
from mega_rl.tracking.report.content import page_of, read_runs


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run folders; seeds of one run become a band.")],
    out: Annotated[Path | None, typer.Option("--out", help="Page to write; else report.html in the first run.")] = None,
) -> None:
    """Write curves, warnings, times, settings and samples of runs as one HTML file that needs no network."""
    page = out or runs[0] / "report.html"
    if page.suffix != ".html":
        raise UserError(f"--out={page}: must end in .html")
    progress.show_progress()
    with progress.phase("reading runs"):
        text = page_of(read_runs(runs))
    disk.make_folder(page.parent)
    disk.replace_text(page, text)
    typer.echo(str(page))


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
) -> None:
    """List versions, devices and optional packages, and what is used where one is missing; or look at a run.

    With --run the exit code is 1 if the run's last end was a hang or a failure.
    """
    if run is not None:
        if require is not None:
            raise UserError("--require and --run: one looks at this machine, the other at a run; give one of them")
        lines, code = overview(run, stacks=stacks)
        typer.echo("\n".join(lines))
        raise typer.Exit(code)
    if stacks:
        raise UserError("--stacks: shows the ranks of a run; give its folder with --run")
    from mega_rl.cli import doctor as machine

    if require is not None:
        lines = list(machine.missing([name for name in require.replace(" ", "").split(",") if name]))
        typer.echo("\n".join(lines) or f"all there: {require}")
        raise typer.Exit(1 if lines else 0)
    for line in machine.report():
        typer.echo(line)
