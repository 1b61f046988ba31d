"""`mega-rl bench`: exit code 0 if every statement holds, 1 if not, 2 for mistakes.

128 + signal, 130 for Ctrl-C, when a signal stopped it.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Annotated

import typer

from mega_rl.cli.help import Commands
from mega_rl.cli.output import print_table
from mega_rl.cli.verify import begin, end
from mega_rl.errors import UserError
from mega_rl.tracking import progress
from mega_rl.tracking.health.guard import StoppedBySignal, stop_on_signals
from mega_rl.verify.learn.tasks import MOST_SEEDS, TASKS, TaskResult, record

log = logging.getLogger(__name__)

app = Commands(name="bench", help="Tasks that show whether the trainer learns.")


@app.callback()
def bench() -> None:
    """Tasks that show whether the trainer learns."""  # with a callback a group keeps the name of its one command


@app.command()
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
) -> None:
    """Train small tasks that a wrong trainer fails, over seeds, and judge the statements about each.

    One process on one core, minutes for each task. Statements are about 95 % intervals over the seeds.
    """
    names = list(dict.fromkeys(names or TASKS))
    if unknown := [name for name in names if name not in TASKS]:
        raise UserError(f"{unknown[0]}: is no task; legal: {' '.join(TASKS)}")
    begin("bench")
    results = []
    try:
        with stop_on_signals():
            with progress.importing("PyTorch and Megatron-Core", announce=True):
                from mega_rl.verify.learn.run import run_task
            for name in names:
                variants = [variant for variant in TASKS[name].variants if ablations or not variant.ablation]
                curves = run_task(TASKS[name], variants, seeds=range(first_seed, first_seed + seeds))
                results.append(TaskResult(TASKS[name], curves))
                _print_task(results[-1])
    except StoppedBySignal as stop:
        log.warning("stopped by %s: the run in progress does not count, no results are written", stop.signal.name)
        raise typer.Exit(stop.exit_code) from None
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps([record(result) for result in results], indent=1) + "\n", encoding="utf-8")
    end(all(result.holds for result in results))


def _print_task(result: TaskResult) -> None:
    rows = []
    for name, curves in result.curves.items():
        final, last = result.finals[name], curves[0].points[-1][0]
        interval = f"{final.low:.4g} to {final.high:.4g}" if len(curves) > 1 else "-"
        rows.append((name, str(len(curves)), str(last), f"{final.mean:.4g}", interval))
    task = result.task
    print_table(("variant", "seeds", "steps", task.unit, "95 %"), rows, title=f"{task.name}: {task.summary}")
    for statement, text, holds in result.verdicts:
        typer.echo(f"{'holds' if holds else 'FAILS'}: {statement.variant}: {text}")
