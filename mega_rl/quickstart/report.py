"""What a quickstart run came to: summary.json, a table and a plot."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mega_rl.metrics.plot import plot_run
from mega_rl.metrics.records import read_metrics

BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Summary:
    """The numbers of one quickstart run."""

    accuracy_before: float  # share of held-out problems answered right, greedily, by the warm-started model
    accuracy_after: float  # the same after PPO
    train_s: float  # seconds of the PPO command, start-up included
    warm_start_s: float  # seconds of the supervised command
    total_s: float  # seconds of everything after installation
    steps: int  # PPO steps
    layout: str  # "megatron tp2-dp1"
    seed: int


def summarize(run_dir: Path, *, layout: str, seed: int, train_s: float, warm_start_s: float, total_s: float) -> Summary:
    """Read the run's metrics, write summary.json and curves.png, print the table; returns the summary."""
    records = list(read_metrics(run_dir / "metrics.jsonl"))
    accuracy = [(r.step, r.metrics["val/reward_mean"]) for r in records if "val/reward_mean" in r.metrics]
    summary = Summary(
        accuracy_before=accuracy[0][1],
        accuracy_after=accuracy[-1][1],
        train_s=train_s,
        warm_start_s=warm_start_s,
        total_s=total_s,
        steps=records[-1].step,
        layout=layout,
        seed=seed,
    )
    (run_dir / "summary.json").write_text(json.dumps(asdict(summary), indent=1) + "\n")
    plot = plot_run(run_dir / "metrics.jsonl", run_dir / "curves.png")
    rewards = [r.metrics["reward/mean"] for r in records if "reward/mean" in r.metrics]
    print_table(summary, rewards=rewards, accuracy=accuracy, run_dir=run_dir, plot=plot)
    return summary


def print_table(
    summary: Summary, *, rewards: list[float], accuracy: list[tuple[int, float]], run_dir: Path, plot: Path
) -> None:
    """The table at the end of `make quickstart`."""
    table = Table(title="PPO", show_header=False, title_justify="left")
    table.add_row("held-out greedy accuracy, before PPO", f"{summary.accuracy_before:.1%}")
    table.add_row("held-out greedy accuracy, after PPO", f"{summary.accuracy_after:.1%}")
    table.add_row("accuracy by step", "  ".join(f"{step}: {value:.0%}" for step, value in accuracy))
    table.add_row("reward by step (0 to 1)", sparkline(rewards))
    table.add_row("steps", f"{summary.steps} on {summary.layout}")
    table.add_row("time", f"warm start {summary.warm_start_s:.0f} s, PPO {summary.train_s:.0f} s")
    table.add_row("numbers", str(run_dir / "metrics.jsonl"))
    table.add_row("samples", str(run_dir / "rollouts"))
    table.add_row("plot", str(plot))
    Console().print(table)


def sparkline(values: list[float], *, width: int = 36) -> str:
    """Values in [0, 1] as bars, averaged down to `width` characters."""
    if not values:
        return ""
    count = min(width, len(values))
    edges = [len(values) * i // count for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    return "".join(BARS[min(int(max(mean, 0.0) * len(BARS)), len(BARS) - 1)] for mean in means)
