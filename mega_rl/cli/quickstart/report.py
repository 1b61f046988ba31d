"""Results of a quickstart run: summary.json, a table and a picture; `mega-rl report` writes the page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import fmean

from mega_rl.cli.text.tables import print_table
from mega_rl.tracking.metrics.plot import plot_runs
from mega_rl.tracking.metrics.records import read_metrics

EXPLAINED = "values/explained_variance"
LAST_STEPS = 10
# Metrics of a validation that are shares -> their names in the table.
_SHARES = (
    (r"val/(pass|maj)_at_([2-9]|[0-9]{2,})|val/(pass)_at_(1)", r"\1\3@\2\4"),
    ("val/reward_correct", "samples, correct"),
    ("val/reward_format", "samples, in the right format"),
)


def summarize(run_dir: Path, *, layout: str, seed: int, train_s: float, warm_start_s: float, total_s: float) -> None:
    """Read the run's metrics, write summary.json and curves.png, and print what the training has changed.

    layout: as "megatron tp2-dp1". train_s and warm_start_s: seconds of the commands; total_s: everything together.
    """
    records = list(read_metrics(run_dir / "metrics.jsonl"))
    validations = [record.metrics for record in records if "val/reward_correct" in record.metrics]
    first, last = validations[0], validations[-1]
    before, after = first["val/reward_correct"], last["val/reward_correct"]
    values = [record.metrics[EXPLAINED] for record in records if EXPLAINED in record.metrics][-LAST_STEPS:]
    explained = fmean(values) if values else None  # share of the returns' variance that the critic explains
    shares = {name: (first[name], last[name]) for name in sorted(last) if _title(name)}
    summary = {
        "accuracy_before": before,  # share of right answers to held-out problems, by the warm-started model
        "accuracy_after": after,
        "explained_variance": explained,
        "train_s": train_s,
        "warm_start_s": warm_start_s,
        "total_s": total_s,
        "steps": records[-1].step,
        "layout": layout,
        "seed": seed,
        "validation": shares,  # before and after
    }
    (run_dir / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    plot = run_dir / "curves.png"
    plot_runs({str(run_dir): run_dir / "metrics.jsonl"}, plot)
    if explained is not None:
        rows = [("held-out greedy accuracy, before PPO", f"{before:.1%}")]
        rows.append(("held-out greedy accuracy, after PPO", f"{after:.1%}"))
        rows.append(("explained variance of the critic", f"{explained:.2f}"))
    else:
        rows = [
            (f"held-out {_title(name)}", f"{a:.1%} before training, {b:.1%} after") for name, (a, b) in shares.items()
        ]
    rows.append(("steps", f"{records[-1].step} on {layout}"))
    rows.append(("time", f"warm start {warm_start_s:.0f} s, training {train_s:.0f} s"))
    print_table(("quickstart", ""), [*rows, ("plot", str(plot))])


def _title(metric: str) -> str:
    """Return the table's name of a share that a validation measures, as pass@4; empty for other metrics."""
    return next((re.sub(pattern, title, metric) for pattern, title in _SHARES if re.fullmatch(pattern, metric)), "")
