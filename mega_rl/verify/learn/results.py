"""Results over seeds: means with 95 % bands, verdicts on statements, files, a table, a plot."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mega_rl.errors import UserError, no_such
from mega_rl.untrusted import parse_object
from mega_rl.verify.learn.tasks import TASKS, Beats, LearningTask, Reaches

MOST_SEEDS = 10
# Quantile 0.975 of Student's t by degrees of freedom, 1 to MOST_SEEDS - 1.
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
NUM_COLUMNS = 2  # panels next to each other in a plot


@dataclass(frozen=True)
class Curve:
    """Result of one run."""

    seed: int
    points: tuple[tuple[int, float], ...]  # (steps done, value)
    seconds: float

    def final(self, count: int) -> float:
        """Return the mean of the last `count` values."""
        return statistics.fmean(value for _, value in self.points[-count:])


@dataclass(frozen=True)
class ConfidenceBand:
    """A mean over seeds with its 95 % confidence interval; one seed has no width."""

    mean: float
    low: float
    high: float


def band(values: Sequence[float]) -> ConfidenceBand:
    """Return mean -+ t * s / sqrt(n), by Student's t; s is the sample deviation."""
    mean, n = statistics.fmean(values), len(values)
    half = T_975[n - 2] * statistics.stdev(values) / math.sqrt(n) if n > 1 else 0.0
    return ConfidenceBand(mean, mean - half, mean + half)


@dataclass(frozen=True)
class VariantResult:
    """Curves of a variant, one of each seed, with points at the same steps."""

    name: str
    curves: tuple[Curve, ...]
    final: ConfidenceBand

    @property
    def last_step(self) -> int:
        """Return the step of the last point."""
        return self.curves[0].points[-1][0]

    @property
    def bands(self) -> list[tuple[int, ConfidenceBand]]:
        """Return (steps done, band) of every point."""
        steps = [step for step, _ in self.curves[0].points]
        return [(step, band([curve.points[i][1] for curve in self.curves])) for i, step in enumerate(steps)]


@dataclass(frozen=True)
class Judgement:
    """A statement in words and whether it holds."""

    variant: str  # subject of the statement
    text: str
    holds: bool


@dataclass(frozen=True)
class TaskResult:
    """Result of a task."""

    task: LearningTask
    variants: tuple[VariantResult, ...]
    verdicts: tuple[Judgement, ...]

    @property
    def holds(self) -> bool:
        """Return whether every statement holds."""
        return all(verdict.holds for verdict in self.verdicts)


def summarize(task: LearningTask, curves: Mapping[str, Sequence[Curve]]) -> TaskResult:
    """Return the result of a task from the curves of its variants, by their names."""
    variants = tuple(
        VariantResult(name, tuple(runs), band([run.final(task.final_points) for run in runs]))
        for name, runs in curves.items()
    )
    finals = {variant.name: variant.final for variant in variants}
    return TaskResult(task, variants, tuple(judge(task, statement, finals) for statement in task.statements))


def judge(task: LearningTask, statement: Reaches | Beats, finals: Mapping[str, ConfidenceBand]) -> Judgement:
    """Return whether a statement holds for the final bands of the variants."""
    above = task.better == "higher"
    name, own = statement.variant, finals[statement.variant]
    end = own.low if above else own.high  # the worse end of the band
    if isinstance(statement, Reaches):
        sign, holds = (">=", end >= statement.bound) if above else ("<=", end <= statement.bound)
        return Judgement(name, f"{name}: band {sign} {statement.bound:g}", holds)
    other = finals[statement.other]
    holds = end > other.high if above else end < other.low
    return Judgement(name, f"{name} beats {statement.other}, bands apart", holds)


def record(result: TaskResult) -> dict[str, object]:
    """Return a result for JSON."""
    task = result.task
    return {
        "task": task.name,
        "summary": task.summary,
        "unit": task.unit,
        "better": task.better,
        "holds": result.holds,
        "statements": [{"text": verdict.text, "holds": verdict.holds} for verdict in result.verdicts],
        "variants": [
            {
                "name": variant.name,
                "final": asdict(variant.final),
                "seeds": [
                    {"seed": curve.seed, "seconds": round(curve.seconds, 1), "points": curve.points}
                    for curve in variant.curves
                ],
            }
            for variant in result.variants
        ],
    }


def read_results(files: Sequence[Path]) -> list[TaskResult]:
    """Return the results of the tasks in files of `bench learn --json`, judged anew.

    Files may share a task's seeds and variants. Raises UserError for a file without such results, for a run that is
    there twice, and for runs that cannot be compared.
    """
    tasks: dict[str, dict[str, list[Curve]]] = {}
    for file in files:
        for task, variant, curve in _read(file):
            runs = tasks.setdefault(task, {}).setdefault(variant, [])
            if curve.seed in {run.seed for run in runs}:
                raise UserError(f"{file}: {task}, {variant}, seed {curve.seed} is there already; give each run once")
            runs.append(curve)
    if unknown := [name for name in tasks if name not in TASKS]:
        raise UserError(f"{unknown[0]}: is no task of this version; legal: {' '.join(TASKS)}")
    return [_judged(task, tasks[name]) for name, task in TASKS.items() if name in tasks]


def _read(file: Path) -> list[tuple[str, str, Curve]]:
    """Return (task, variant, curve) of every run in a file."""
    try:
        return [
            (
                str(task["task"]),
                str(variant["name"]),
                Curve(int(run["seed"]), tuple((int(x), float(y)) for x, y in run["points"]), float(run["seconds"])),
            )
            for task in parse_object(f'{{"tasks": {file.read_text(encoding="utf-8")}}}')["tasks"]
            for variant in task["variants"]
            for run in variant["seeds"]
        ]
    except OSError:
        raise UserError(f"{file}: {no_such('file', file)}; give files of mega-rl bench learn --json") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file}: is no file of mega-rl bench learn --json ({error})") from None


def _judged(task: LearningTask, runs: Mapping[str, Sequence[Curve]]) -> TaskResult:
    """Return the result of a task's runs. Raises UserError if they cannot be compared."""
    names = [variant.name for variant in task.variants]
    needed = [one.variant for one in task.statements] + [one.other for one in task.statements if isinstance(one, Beats)]
    if unknown := [name for name in runs if name not in names]:
        raise UserError(f"{task.name}: {unknown[0]} is no variant of this version; legal: {'; '.join(names)}")
    if missing := [name for name in needed if name not in runs]:
        raise UserError(f"{task.name}: there are no runs of {missing[0]}, which its statements are about")
    curves = {name: sorted(runs[name], key=lambda run: run.seed) for name in names if name in runs}
    first = [run.seed for run in next(iter(curves.values()))]
    for name, own in curves.items():
        seeds = [run.seed for run in own]
        if seeds != first or len(seeds) > MOST_SEEDS:
            rule = f"legal: the same ones, {MOST_SEEDS} at most"
            raise UserError(f"{task.name}: {name} has seeds {seeds}, the first variant {first}; {rule}")
        if len({tuple(step for step, _ in run.points) for run in own}) > 1 or not own[0].points:
            raise UserError(f"{task.name}: runs of {name} have points at different steps, or none; train them again")
    return summarize(task, curves)


def markdown_table(results: Sequence[TaskResult]) -> str:
    """Return the rows of docs/learning.md, one for each variant."""
    lines = ["| task | variant | steps | result, 95 % band | statement | |", "|---|---|---|---|---|---|"]
    for result in results:
        name, unit = result.task.name, f" {result.task.unit}"
        for variant in result.variants:
            own = [verdict for verdict in result.verdicts if verdict.variant == variant.name]
            final = variant.final
            cells = [
                name,
                variant.name,
                str(variant.last_step),
                f"{final.mean:.3g} ({final.low:.3g} to {final.high:.3g}){unit}",
                "; ".join(verdict.text.removeprefix(variant.name).lstrip(": ") for verdict in own),
                ("holds" if all(verdict.holds for verdict in own) else "**fails**") if own else "",
            ]
            lines.append(f"| {' | '.join(cells)} |")
            name = unit = ""
    return "\n".join(lines)


def plot_tasks(results: Sequence[TaskResult], picture: Path) -> None:
    """Draw each task's variants, mean and 95 % band; equal results give equal bytes."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(NUM_COLUMNS, len(results))
    rows = -(-len(results) // columns)
    figure = Figure(figsize=(5.5 * columns, 3.4 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for place, result in enumerate(results, start=1):
        axes = figure.add_subplot(rows, columns, place)
        for variant in result.variants:
            steps = [step for step, _ in variant.bands]
            bands = [band for _, band in variant.bands]
            (line,) = axes.plot(steps, [band.mean for band in bands], label=variant.name)
            axes.fill_between(
                steps, [band.low for band in bands], [band.high for band in bands], color=line.get_color(), alpha=0.2
            )
        if result.task.better == "lower":
            axes.set_yscale("log", nonpositive="mask")
        axes.set_title(result.task.name, fontsize=10)
        axes.set_xlabel("step", fontsize=8)
        axes.set_ylabel(result.task.unit, fontsize=8)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    picture.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "mega_rl", "svg.fonttype": "none"}):
        metadata = {"Date": None} if picture.suffix == ".svg" else None
        figure.savefig(picture, dpi=110, metadata=metadata)
