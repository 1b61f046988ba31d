"""Results of a quickstart run: summary.json, a table and a plot; `mega-rl report` writes the page."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

from mega_rl.tracking.metrics.plot import plot_runs
from mega_rl.tracking.metrics.records import read_metrics

EXPLAINED = "values/explained_variance"
LAST_STEPS = 10
_PARTS = {"correct": "samples, correct", "format": "samples, in the right format"}
_SHARE = re.compile(r"val/(?:pass_at_[0-9]+|maj_at_(?:[2-9]|[0-9]{2,})|reward_(?:correct|format))")


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


def summarize(
    run_dir: Path, *, layout: str, seed: int, train_s: float, warm_start_s: float, total_s: float
) -> tuple[Summary, Path]:
    """Read the run's metrics, write summary.json and curves.png; returns the summary and the picture's path."""
    records = list(read_metrics(run_dir / "metrics.jsonl"))
    validations = [r.metrics for r in records if "val/reward_correct" in r.metrics]
    first, last = validations[0], validations[-1]
    explained = [r.metrics[EXPLAINED] for r in records if EXPLAINED in r.metrics][-LAST_STEPS:]
    summary = Summary(
        accuracy_before=first["val/reward_correct"],
        accuracy_after=last["val/reward_correct"],
        explained_variance=fmean(explained) if explained else None,
        train_s=train_s,
        warm_start_s=warm_start_s,
        total_s=total_s,
        steps=records[-1].step,
        layout=layout,
        seed=seed,
        validation={name: (first[name], last[name]) for name in sorted(last) if _is_share(name)},
    )
    (run_dir / "summary.json").write_text(json.dumps(asdict(summary), indent=1) + "\n")
    plot = run_dir / "curves.png"
    plot_runs({str(run_dir): run_dir / "metrics.jsonl"}, plot)
    return summary, plot


def print_table(summary: Summary, *, plot: Path) -> None:
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


def _is_share(name: str) -> bool:
    """Return whether a metric of a validation is a share: pass@k, maj@k, or a part of the reward."""
    return _SHARE.fullmatch(name) is not None


def _title(name: str) -> str:
    """Return how the table names a metric: pass@4, samples in the right format."""
    kind, _, k = name.removeprefix("val/").partition("_at_")
    return f"{kind}@{k}" if k else _PARTS[kind.removeprefix("reward_")]
