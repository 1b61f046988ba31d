"""`mega-rl bench judge`: exit code 0 when every statement holds, 1 when one does not, 2 for mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mega_rl.bench.learn.saved import markdown_table, read_results
from mega_rl.cli.text.learning import check_picture, print_task, write_results


def judge(
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Of mega-rl bench learn --json.")],
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all results.")] = None,
    picture: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw the curves: .svg, .png or .pdf.")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print one Markdown table instead.")] = False,
) -> None:
    """Judge results of `mega-rl bench learn` again, together where several commands trained parts of them.

    Tasks, variants or seeds may be spread over the files, as when every core trains a task.
    """
    check_picture(picture)
    results = read_results(files)
    if markdown:
        typer.echo(markdown_table(results))
    else:
        for result in results:
            print_task(result)
    write_results(results, json_file, picture)
