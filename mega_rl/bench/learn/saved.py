"""Results that `mega-rl bench learn --json` wrote, of one command or of several. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from mega_rl.bench.learn.results import MOST_SEEDS, Curve, TaskResult, summarize
from mega_rl.bench.learn.task import Beats, LearningTask
from mega_rl.bench.learn.tasks import TASKS
from mega_rl.errors import UserError, no_such
from mega_rl.storage.strict_json import parse_object

Runs = dict[str, list[Curve]]  # by variant


def read_results(files: Sequence[Path]) -> list[TaskResult]:
    """Return the results of the tasks in these files, judged anew; files may share a task's seeds and variants.

    Raises UserError: a file that is no such result, a run that is there twice, or runs that cannot be compared.
    """
    tasks: dict[str, Runs] = {}
    for file in files:
        for task, variant, curve in _read(file):
            runs = tasks.setdefault(task, {}).setdefault(variant, [])
            if curve.seed in {run.seed for run in runs}:
                raise UserError(f"{file}: {task}, {variant}, seed {curve.seed} is there already; give each run once")
            runs.append(curve)
    unknown = [name for name in tasks if name not in TASKS]
    if unknown:
        raise UserError(f"{unknown[0]}: is no task of this version; legal: {' '.join(TASKS)}")
    return [_judged(task, tasks[name]) for name, task in TASKS.items() if name in tasks]


def markdown_table(results: Sequence[TaskResult]) -> str:
    """Return the rows of docs/learning.md, one for each variant."""
    lines = ["| task | variant | seeds | steps | result, 95 % band | statement | |", "|---|---|---|---|---|---|---|"]
    for result in results:
        name, unit = result.task.name, f" {result.task.unit}"
        for variant in result.variants:
            own = [verdict for verdict in result.verdicts if verdict.variant == variant.name]
            seeds, final = [curve.seed for curve in variant.curves], variant.final
            cells = [
                name,
                variant.name,
                f"{seeds[0]} to {seeds[-1]}",
                str(variant.curves[0].points[-1][0]),
                f"{final.mean:.3g} ({final.low:.3g} to {final.high:.3g}){unit}",
                "; ".join(verdict.text.removeprefix(variant.name).lstrip(": ") for verdict in own),
                ("holds" if all(verdict.holds for verdict in own) else "**fails**") if own else "",
            ]
            lines.append(f"| {' | '.join(cells)} |")
            name = unit = ""
    return "\n".join(lines)


def _read(file: Path) -> Iterator[tuple[str, str, Curve]]:
    """Yield (task, variant, curve) of every run in a file."""
    try:
        tasks = parse_object(f'{{"tasks": {file.read_text(encoding="utf-8")}}}')["tasks"]
        runs = [
            (task["task"], variant["name"], run)
            for task in tasks
            for variant in task["variants"]
            for run in variant["seeds"]
        ]
        curves = [
            (
                str(task),
                str(variant),
                Curve(
                    int(run["seed"]), tuple((int(step), float(y)) for step, y in run["points"]), float(run["seconds"])
                ),
            )
            for task, variant, run in runs
        ]
    except OSError:
        raise UserError(f"{file}: {no_such('file', file)}; give files of mega-rl bench learn --json") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file}: is no file of mega-rl bench learn --json ({error})") from None
    yield from curves


def _judged(task: LearningTask, runs: Runs) -> TaskResult:
    """Return the result of a task from runs that can be compared."""
    names = [variant.name for variant in task.variants]
    unknown = [name for name in runs if name not in names]
    if unknown:
        raise UserError(f"{task.name}: {unknown[0]} is no variant of this version; legal: {'; '.join(names)}")
    judged = {statement.variant for statement in task.statements}
    judged |= {statement.other for statement in task.statements if isinstance(statement, Beats)}
    missing = [name for name in names if name in judged and name not in runs]
    if missing:
        raise UserError(f"{task.name}: there are no runs of {missing[0]}, which its statements are about")
    curves = {name: sorted(runs[name], key=lambda run: run.seed) for name in names if name in runs}
    seeds = {name: [run.seed for run in curves[name]] for name in curves}
    first = next(iter(seeds.values()))
    for name, own in seeds.items():
        if own != first or len(own) > MOST_SEEDS:
            rule = f"legal: the same ones, {MOST_SEEDS} at most"
            raise UserError(f"{task.name}: {name} has seeds {own}, the first variant {first}; {rule}")
        if len({tuple(step for step, _ in run.points) for run in curves[name]}) > 1 or not curves[name][0].points:
            raise UserError(f"{task.name}: runs of {name} have points at different steps, or none; train them again")
    return summarize(task, curves)
