"""Write the table of docs/learning.md and docs/learning.svg from docs/learning.json: `make bench-learn`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from mega_rl.verify.learn.tasks import TASKS, Curve, TaskResult, band

DOCS = Path(__file__).parents[1] / "docs"
HEAD = "| task | variant | steps | result, 95 % band | statement | |\n|---|---|---|---|---|---|\n"
NUM_COLUMNS = 2  # panels next to each other in a plot


def read_results(file: Path) -> list[TaskResult]:
    """Return the results in a file of `mega-rl bench learn --json`, judged anew."""
    results = []
    for task in json.loads(file.read_text(encoding="utf-8")):
        curves = {
            variant["name"]: [
                Curve(run["seed"], tuple((step, value) for step, value in run["points"]), run["seconds"])
                for run in variant["seeds"]
            ]
            for variant in task["variants"]
        }
        results.append(TaskResult(TASKS[task["task"]], curves))
    return results


def markdown_table(results: Sequence[TaskResult]) -> str:
    """Return the rows of the page, one for each variant."""
    lines = []
    for result in results:
        name, unit = result.task.name, f" {result.task.unit}"
        for variant, curves in result.curves.items():
            own = [(text, holds) for statement, text, holds in result.verdicts if statement.variant == variant]
            final, last = result.finals[variant], curves[0].points[-1][0]
            said = "; ".join(text for text, _ in own)
            verdict = ("holds" if all(holds for _, holds in own) else "**fails**") if own else ""
            interval = f"{final.mean:.3g} ({final.low:.3g} to {final.high:.3g}){unit}"
            lines.append(f"| {name} | {variant} | {last} | {interval} | {said} | {verdict} |")
            name = unit = ""
    return HEAD + "\n".join(lines)


def plot_tasks(results: Sequence[TaskResult], picture: Path) -> None:
    """Draw each task's variants, mean and 95 % band; equal results give equal bytes."""
    columns = min(NUM_COLUMNS, len(results))
    rows = -(-len(results) // columns)
    figure = Figure(figsize=(5.5 * columns, 3.4 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for place, result in enumerate(results, start=1):
        axes = figure.add_subplot(rows, columns, place)
        for name, curves in result.curves.items():
            steps = [step for step, _ in curves[0].points]
            bands = [band([curve.points[i][1] for curve in curves]) for i in range(len(steps))]
            (line,) = axes.plot(steps, [each.mean for each in bands], label=name)
            low, high = [each.low for each in bands], [each.high for each in bands]
            axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.2)
        if result.task.better == "lower":
            axes.set_yscale("log", nonpositive="mask")
        axes.set_title(result.task.name, fontsize=10)
        axes.set_xlabel("step", fontsize=8)
        axes.set_ylabel(result.task.unit, fontsize=8)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    with matplotlib.rc_context({"svg.hashsalt": "mega_rl", "svg.fonttype": "none"}):
        figure.savefig(picture, dpi=110, metadata={"Date": None})


def main() -> None:
    """Write the page's table and picture."""
    results, page = read_results(DOCS / "learning.json"), DOCS / "learning.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(HEAD)
    _, _, after = rest.partition("\n\n")
    page.write_text(f"{before}{markdown_table(results)}\n\n{after}", encoding="utf-8")
    plot_tasks(results, DOCS / "learning.svg")


if __name__ == "__main__":
    main()
