"""Plot of learning tasks: a panel each, with the mean and the 95 % band of every variant."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mega_rl.bench.learn.results import TaskResult

NUM_COLUMNS = 2


def plot_tasks(results: Sequence[TaskResult], picture: Path) -> None:
    """Draw the curves of each task; picture: .svg, .png or .pdf. The same results give the same bytes."""
    import matplotlib  # half a second that only this function needs
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
