"""Results of a quickstart run: summary.json, a table and a plot."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

from mega_rl.metrics.plot import plot_runs
from mega_rl.metrics.records import read_metrics

EXPLAINED = "values/explained_variance"
LAST_STEPS = 10


@dataclass(frozen=True)
class Summary:
    """Results of one quickstart run."""

    accuracy_before: float  # share of held-out problems answered right, greedily, by the warm-started model
    accuracy_after: float  # the same after PPO
    explained_variance: float  # share of the returns' variance that the critic explains, mean of the last steps
    train_s: float  # seconds of the PPO command, start-up included
    warm_start_s: float  # seconds of the supervised command
    total_s: float  # seconds of everything after installation
    steps: int  # PPO steps
    layout: str  # "megatron tp2-dp1"
    seed: int


def summarize(
    run_dir: Path, *, layout: str, seed: int, train_s: float, warm_start_s: float, total_s: float
) -> tuple[Summary, Path]:
    """Read the run's metrics, write summary.json and curves.png; returns the summary and the picture's path."""
    records = list(read_metrics(run_dir / "metrics.jsonl"))
    accuracy = [r.metrics["val/reward_correct"] for r in records if "val/reward_correct" in r.metrics]
    explained = [r.metrics[EXPLAINED] for r in records if EXPLAINED in r.metrics][-LAST_STEPS:]
    summary = Summary(
        accuracy_before=accuracy[0],
        accuracy_after=accuracy[-1],
        explained_variance=fmean(explained),
        train_s=train_s,
        warm_start_s=warm_start_s,
        total_s=total_s,
        steps=records[-1].step,
        layout=layout,
        seed=seed,
    )
    (run_dir / "summary.json").write_text(json.dumps(asdict(summary), indent=1) + "\n")
    plot = run_dir / "curves.png"
    plot_runs({str(run_dir): run_dir / "metrics.jsonl"}, plot)
    return summary, plot


def print_table(summary: Summary, *, plot: Path) -> None:
    """Print the table that ends `mega-rl quickstart`, below the one of the run itself."""
    table = Table(title="quickstart", show_header=False, title_justify="left")
    table.add_row("held-out greedy accuracy, before PPO", f"{summary.accuracy_before:.1%}")
    table.add_row("held-out greedy accuracy, after PPO", f"{summary.accuracy_after:.1%}")
    table.add_row("explained variance of the critic", f"{summary.explained_variance:.2f}")
    table.add_row("steps", f"{summary.steps} on {summary.layout}")
    table.add_row("time", f"warm start {summary.warm_start_s:.0f} s, PPO {summary.train_s:.0f} s")
    table.add_row("plot", str(plot))
    Console().print(table)
