"""Plot of the curves of one run or several."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from mega_rl.errors import UserError
from mega_rl.tracking.metrics.records import read_series

# Title and the metrics drawn together; * stands for the name of a set of held-out prompts. Empty panels are left out.
_PANELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Reward", ("reward/mean",)),
    ("Held-out reward", ("val/reward_mean", "val/*/reward_mean")),
    ("Loss", ("actor/loss", "critic/loss")),
    ("KL to the reference, nats per token", ("kl/ref",)),
    ("Gradient norm", ("actor/grad_norm", "critic/grad_norm")),
    ("|trainer - rollout| log-prob, nats", ("rollout/logprob_diff_max", "rollout/logprob_diff_mean")),
    ("Response length, tokens", ("rollout/response_tokens_mean",)),
    ("Step time, s", ("time/step_s", "time/generate_s", "time/update_actor_s")),
)
_NUM_COLUMNS = 2
_MARKED_STEPS = 40  # shorter curves have a mark at each step


def smoothed(values: Sequence[float], weight: float) -> list[float]:
    """Return the exponential moving average of values, divided by the weight seen so far.

    weight: of the average before each value, from 0 (the values themselves) to below 1. A value that is not finite
    leaves the average as it is; before the first finite value the average is NaN.
    """
    total = seen = 0.0
    averages = []
    for value in values:
        if math.isfinite(value):
            total = weight * total + (1.0 - weight) * value
            seen = weight * seen + (1.0 - weight)
        averages.append(total / seen if seen else math.nan)
    return averages


def plot_runs(files: Mapping[str, Path], picture: Path, *, names: Sequence[str] = (), smooth: float = 0.0) -> None:
    """Draw runs' curves over their steps into a picture, the runs together in each panel.

    files: metrics.jsonl of each run by its label in the legend. picture: .png, .svg or .pdf. names: metrics, a panel
    for each; without them the usual panels are drawn (reward, held-out reward, losses, ...). smooth: see `smoothed`;
    above 0 the raw curve stays behind the smooth one.

    Raises:
        UserError: a file is damaged, or the runs have none of the metrics.
    """
    # Imported here: half a second that only this function needs. The object interface needs no display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    runs = {label: read_series(file) for label, file in files.items()}
    panels = _panels({name for series in runs.values() for name in series}, names)
    if not panels:
        raise UserError(f"{', '.join(map(str, files.values()))}: no metric to draw yet")
    num_columns = min(_NUM_COLUMNS, len(panels))
    num_rows = -(-len(panels) // num_columns)
    figure = Figure(figsize=(5.5 * num_columns, 2.8 * num_rows), layout="constrained")
    FigureCanvasAgg(figure)
    for place, (title, drawn) in enumerate(panels, start=1):
        axes = figure.add_subplot(num_rows, num_columns, place)
        for label, name in ((label, name) for label in runs for name in drawn if name in runs[label]):
            words = " ".join(filter(None, (label * (len(runs) > 1), name * (len(drawn) > 1)))) or None
            steps, values = runs[label][name].steps, runs[label][name].values
            if smooth:
                (line,) = axes.plot(steps, smoothed(values, smooth), label=words)
                axes.plot(steps, values, color=line.get_color(), alpha=0.25, linewidth=1.0, zorder=1)
            else:
                axes.plot(steps, values, label=words, marker="." if len(steps) < _MARKED_STEPS else None)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("step", fontsize=8)
        axes.grid(alpha=0.3)
        if len(drawn) > 1 or len(runs) > 1:
            axes.legend(fontsize=7)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)


def _panels(there: Collection[str], names: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return (title, metrics) of each panel. Raises UserError for an unknown name."""
    unknown = [name for name in names if name not in there]
    if unknown:
        raise UserError(f"--metrics: no run has {', '.join(unknown)}; there are {', '.join(sorted(there)[:10])}, ...")
    if names:
        return [(name, [name]) for name in names]
    usual = [
        (title, [name for pattern in drawn for name in sorted(there) if fnmatchcase(name, pattern)])
        for title, drawn in _PANELS
    ]
    return [(title, drawn) for title, drawn in usual if drawn]
