"""Results of a quickstart run: summary.json, a table and a picture; `mega-rl report` writes the page."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

from mega_rl.metrics.plot import plot_runs
from mega_rl.metrics.records import read_metrics

EXPLAINED = "values/explained_variance"
LAST_STEPS = 10
# Metrics of a validation that are shares -> their titles in the table.
_SHARES = (
    (r"val/(pass|maj)_at_([2-9]|[0-9]{2,})|val/(pass)_at_(1)", r"\1\3@\2\4"),
    ("val/reward_correct", "samples, correct"),
    ("val/reward_format", "samples, in the right format"),
)


@dataclass(frozen=True)
class Summary:
    """Results of one quickstart run."""

    accuracy_before: float  # share of right answers to held-out problems, by the warm-started model
    accuracy_after: float  # the same after training
    explained_variance: float | None  # share of the returns' variance that the critic explains, mean of the last steps
    train_s: float  # seconds of the training command, start-up included
    warm_start_s: float  # seconds of the supervised command
    total_s: float  # seconds of everything after installation
    steps: int  # of training
    layout: str  # "megatron tp2-dp1"
    seed: int
    validation: dict[str, tuple[float, float]]  # before and after: "val/pass_at_4", "val/reward_format", ...


def summarize(run_dir: Path, *, layout: str, seed: int, **seconds: float) -> tuple[Summary, Path]:
    """Read the run's metrics, write summary.json and curves.png; return the summary and the picture's path.

    seconds: train_s, warm_start_s and total_s of the summary.
    """
    records = list(read_metrics(run_dir / "metrics.jsonl"))
    validations = [record.metrics for record in records if "val/reward_correct" in record.metrics]
    first, last = validations[0], validations[-1]
    explained = [record.metrics[EXPLAINED] for record in records if EXPLAINED in record.metrics][-LAST_STEPS:]
    summary = Summary(
        accuracy_before=first["val/reward_correct"],
        accuracy_after=last["val/reward_correct"],
        explained_variance=fmean(explained) if explained else None,
        steps=records[-1].step,
        layout=layout,
        seed=seed,
        validation={name: (first[name], last[name]) for name in sorted(last) if _title(name)},
        **seconds,
    )
    (run_dir / "summary.json").write_text(json.dumps(asdict(summary), indent=1) + "\n")
    plot = run_dir / "curves.png"
    plot_runs({str(run_dir): run_dir / "metrics.jsonl"}, plot)
    return summary, plot


def print_table(summary: Summary, *, plot: Path) -> None:
    """Print what the training has changed, and its time."""
    table = Table(title="quickstart", show_header=False, title_justify="left")
    if summary.explained_variance is not None:
        table.add_row("held-out greedy accuracy, before PPO", f"{summary.accuracy_before:.1%}")
        table.add_row("held-out greedy accuracy, after PPO", f"{summary.accuracy_after:.1%}")
        table.add_row("explained variance of the critic", f"{summary.explained_variance:.2f}")
    else:
        for name, (before, after) in summary.validation.items():
            table.add_row(f"held-out {_title(name)}", f"{before:.1%} before training, {after:.1%} after")
    table.add_row("steps", f"{summary.steps} on {summary.layout}")
    table.add_row("time", f"warm start {summary.warm_start_s:.0f} s, training {summary.train_s:.0f} s")
    table.add_row("plot", str(plot))
    Console().print(table)


def _title(metric: str) -> str:
    """Return the table's name of a share that a validation measures, as pass@4; empty for other metrics."""
    return next((re.sub(pattern, title, metric) for pattern, title in _SHARES if re.fullmatch(pattern, metric)), "")
