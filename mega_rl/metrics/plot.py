"""A picture of a run."""

from __future__ import annotations

from pathlib import Path

from mega_rl.metrics.records import read_metrics

# Title and the metrics drawn together; a panel without any of its metrics is left out.
_PANELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Reward", ("reward/mean",)),
    ("Held-out reward (greedy)", ("val/reward_mean",)),
    ("Loss", ("actor/loss", "critic/loss")),
    ("KL to the reference, nats per token", ("kl/ref",)),
    ("Gradient norm", ("actor/grad_norm", "critic/grad_norm")),
    ("|trainer - rollout| log-prob, nats", ("rollout/logprob_diff_max", "rollout/logprob_diff_mean")),
    ("Response length, tokens", ("rollout/response_tokens_mean",)),
    ("Step time, s", ("time/step_s", "time/generate_s", "time/update_actor_s")),
)
_NUM_COLUMNS = 2


def series(metrics_jsonl: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) points of every metric of a run, in order."""
    points: dict[str, list[tuple[int, float]]] = {}
    for record in read_metrics(metrics_jsonl):
        for name, value in record.metrics.items():
            points.setdefault(name, []).append((record.step, value))
    return points


def plot_run(metrics_jsonl: Path, png_path: Path) -> Path:
    """Draw the run's curves (reward, accuracy, losses, KL, ...) over its steps into a PNG; returns its path.

    Raises ValueError when the file holds none of the metrics that are drawn.
    """
    # Imported here: half a second that only this function needs. The object interface needs no display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    points = series(metrics_jsonl)
    panels = [(title, [name for name in names if name in points]) for title, names in _PANELS]
    panels = [(title, names) for title, names in panels if names]
    if not panels:
        raise ValueError(f"{metrics_jsonl} holds no metric to draw")
    num_rows = -(-len(panels) // _NUM_COLUMNS)
    figure = Figure(figsize=(5.5 * _NUM_COLUMNS, 2.8 * num_rows), layout="constrained")
    FigureCanvasAgg(figure)
    for place, (title, names) in enumerate(panels, start=1):
        axes = figure.add_subplot(num_rows, _NUM_COLUMNS, place)
        for name in names:
            steps, values = zip(*points[name], strict=True)
            axes.plot(steps, values, label=name, marker="." if len(steps) < 40 else None)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("step", fontsize=8)
        axes.grid(alpha=0.3)
        if len(names) > 1:
            axes.legend(fontsize=7)
    png_path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(png_path, dpi=110)
    return png_path
