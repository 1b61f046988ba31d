"""`mega-rl bench learn`: exit code 0 when every statement holds, 1 when one does not, 2 for mistakes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from mega_rl import progress
from mega_rl.bench.learn.plot import plot_tasks
from mega_rl.bench.learn.results import MOST_SEEDS, TaskResult, record, summarize
from mega_rl.bench.learn.task import LearningTask
from mega_rl.bench.learn.tasks import TASKS
from mega_rl.cli.verify import EXIT_DIFFERS, refuse_launcher
from mega_rl.errors import UserError

PICTURES = (".svg", ".png", ".pdf")


def learn(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="TASK", help=f"Of {', '.join(TASKS)}; all unless given.")
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, max=MOST_SEEDS, help="Runs of each variant.")] = 5,
    first_seed: Annotated[
        int,
        typer.Option(
            "--first-seed", min=0, help="Of consecutive ones. The tasks were tuned on 0 to 14 and 100 to 103."
        ),
    ] = 20,
    ablations: Annotated[
        bool, typer.Option("--ablations", help="Also train the variants that no statement is about.")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the results.")] = None,
    picture: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw the curves: .svg, .png or .pdf.")
    ] = None,
) -> None:
    """Train small tasks that a wrong trainer fails, over seeds, and judge the statements about each.

    One process on one core, minutes for each task. Statements are about 95 % intervals over the seeds.
    """
    tasks = _chosen(names or list(TASKS))
    if picture is not None and picture.suffix not in PICTURES:
        raise UserError(f"--plot={picture}: must end in {', '.join(PICTURES)}")
    progress.show_progress()
    refuse_launcher()
    with progress.importing("PyTorch and Megatron-Core", announce=True):
        from mega_rl.bench.learn.run import run_task
    results = []
    for task in tasks:
        variants = [variant for variant in task.variants if ablations or not variant.ablation]
        result = summarize(task, run_task(task, variants, seeds=range(first_seed, first_seed + seeds)))
        results.append(result)
        _print_task(result, seeds=seeds)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps([record(result) for result in results], indent=1) + "\n", encoding="utf-8")
    if picture is not None:
        plot_tasks(results, picture)
    if not all(verdict.holds for result in results for verdict in result.verdicts):
        raise typer.Exit(EXIT_DIFFERS)


def _chosen(names: Sequence[str]) -> list[LearningTask]:
    """Return the tasks of these names. Raises UserError for a name that no task has."""
    unknown = [name for name in names if name not in TASKS]
    if unknown:
        raise UserError(f"{unknown[0]}: is no task; legal: {' '.join(TASKS)}")
    return [TASKS[name] for name in dict.fromkeys(names)]


def _print_task(result: TaskResult, *, seeds: int) -> None:
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
        final = variant.final
        interval = f"{final.low:.4g} to {final.high:.4g}" if seeds > 1 else "-"
        steps = variant.curves[0].points[-1][0]
        table.add_row(variant.name, str(seeds), str(steps), f"{final.mean:.4g}", interval)
    console = Console()
    Console(width=None if console.is_terminal else 160).print(table)
    for verdict in result.verdicts:
        console.print(f"{'holds' if verdict.holds else 'FAILS'}: {verdict.text}", markup=False, highlight=False)
