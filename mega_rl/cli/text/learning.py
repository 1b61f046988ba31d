"""Results of learning tasks as tables, files and an exit code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import typer

from mega_rl.bench.learn.plot import plot_tasks
from mega_rl.bench.learn.results import TaskResult, record
from mega_rl.cli.verify import EXIT_DIFFERS
from mega_rl.errors import UserError

PICTURES = (".svg", ".png", ".pdf")


def check_picture(picture: Path | None) -> None:
    """Raise UserError for a plot of a format that is not drawn."""
    if picture is not None and picture.suffix not in PICTURES:
        raise UserError(f"--plot={picture}: must end in {', '.join(PICTURES)}")


def print_task(result: TaskResult) -> None:
    """Print the table of a task, its statements and their verdicts."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    task = result.task
    title = f"{task.name}: {task.summary}"
    table = Table(
        "variant", "seeds", "steps", task.unit, "95 %", box=box.SIMPLE_HEAD, title=title, title_justify="left"
    )
    for variant in result.variants:
        final, seeds = variant.final, len(variant.curves)
        interval = f"{final.low:.4g} to {final.high:.4g}" if seeds > 1 else "-"
        steps = variant.curves[0].points[-1][0]
        table.add_row(variant.name, str(seeds), str(steps), f"{final.mean:.4g}", interval)
    console = Console()
    Console(width=None if console.is_terminal else 160).print(table)
    for verdict in result.verdicts:
        console.print(f"{'holds' if verdict.holds else 'FAILS'}: {verdict.text}", markup=False, highlight=False)


def write_results(results: Sequence[TaskResult], json_file: Path | None, picture: Path | None) -> None:
    """Write the results and draw the curves. Raises typer.Exit with code 1 when a statement does not hold."""
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps([record(result) for result in results], indent=1) + "\n", encoding="utf-8")
    if picture is not None:
        plot_tasks(results, picture)
    if not all(verdict.holds for result in results for verdict in result.verdicts):
        raise typer.Exit(EXIT_DIFFERS)
