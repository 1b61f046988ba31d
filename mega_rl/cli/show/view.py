"""`mega-rl view`: the report of a run that goes on, in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mega_rl.tracking import progress
from mega_rl.tracking.report.server import ViewServer


def view(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run folders, as of report.")],
    port: Annotated[int, typer.Option("--port", help="Port on 127.0.0.1; 0 takes a free one.", min=0, max=65535)] = 0,
    refresh: Annotated[int, typer.Option("--refresh", help="Seconds between two looks at the files.", min=1)] = 5,
) -> None:
    """Show live runs as a page on this machine, from their files only; Ctrl-C ends it."""
    progress.show_progress()
    with progress.phase("reading runs"):
        server = ViewServer(runs, port=port, refresh_s=refresh)
    with server:
        typer.echo(server.address)
        typer.echo("the address is for you alone: it carries the token; Ctrl-C ends the viewer", err=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            typer.echo("", err=True)
