"""`mega-rl report`: runs as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mega_rl.errors import UserError
from mega_rl.storage import disk
from mega_rl.tracking import progress
from mega_rl.tracking.report.content import page_of
from mega_rl.tracking.report.runs import read_runs

PAGE = "report.html"


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run folders; seeds of one run become a band.")],
    out: Annotated[Path | None, typer.Option("--out", help="Page to write; else report.html in the first run.")] = None,
) -> None:
    """Write curves, warnings, times, settings and samples of runs as one HTML file that needs no network."""
    page = out or runs[0] / PAGE
    if page.suffix != ".html":
        raise UserError(f"--out={page}: must end in .html")
    if page.is_dir():
        raise UserError(f"--out={page}: is a folder; name a file")
    progress.show_progress()
    with progress.phase("reading runs"):
        text = page_of(read_runs(runs))
    disk.make_folder(page.parent)
    disk.replace_text(page, text)
    typer.echo(str(page))
