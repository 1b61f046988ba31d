"""`mega-rl bench learn`: exit code 0 when every statement holds, 1 when one does not, 2 for mistakes.

128 + signal, 130 for Ctrl-C, when a signal stopped it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from mega_rl.bench.learn.results import MOST_SEEDS, TaskResult, summarize
from mega_rl.bench.learn.task import LearningTask
from mega_rl.bench.learn.tasks import TASKS
from mega_rl.cli.text.learning import check_picture, print_task, write_results
from mega_rl.cli.verify import refuse_launcher
from mega_rl.errors import UserError
from mega_rl.health.interruption import StoppedBySignal, stop_on_signals
from mega_rl.tracking import progress

log = logging.getLogger(__name__)


def learn(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="TASK", help=f"Of {', '.join(TASKS)}; all unless given.")
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, max=MOST_SEEDS, help="Runs of each variant.")] = 5,
    first_seed: Annotated[
        int,
        typer.Option(
            "--first-seed", min=0, help="Of consecutive ones. The tasks were tuned on 0 to 14 and 100 to 104."
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
    check_picture(picture)
    progress.show_progress()
    refuse_launcher()
    try:
        with stop_on_signals():
            results = _train(tasks, ablations=ablations, seeds=range(first_seed, first_seed + seeds))
    except StoppedBySignal as stop:
        log.warning("stopped by %s: the run in progress does not count, no results are written", stop.signal.name)
        raise typer.Exit(stop.exit_code) from None
    write_results(results, json_file, picture)


def _train(tasks: Sequence[LearningTask], *, ablations: bool, seeds: Sequence[int]) -> list[TaskResult]:
    """Train the variants of tasks, and print the table of each task; returns the results."""
    with progress.importing("PyTorch and Megatron-Core", announce=True):
        from mega_rl.bench.learn.run import run_task
    results = []
    for task in tasks:
        variants = [variant for variant in task.variants if ablations or not variant.ablation]
        results.append(summarize(task, run_task(task, variants, seeds=seeds)))
        print_task(results[-1])
    return results


def _chosen(names: Sequence[str]) -> list[LearningTask]:
    """Return the tasks of these names. Raises UserError for a name that no task has."""
    unknown = [name for name in names if name not in TASKS]
    if unknown:
        raise UserError(f"{unknown[0]}: is no task; legal: {' '.join(TASKS)}")
    return [TASKS[name] for name in dict.fromkeys(names)]
