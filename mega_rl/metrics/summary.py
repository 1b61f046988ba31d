"""The outcome of a run as a table at its end, from the files it has written."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mega_rl.metrics.records import StepMetrics, held_out_reward, read_metrics
from mega_rl.progress.terminal import clock, standard_error

METRICS = "metrics.jsonl"
BARS = "▁▂▃▄▅▆▇█"
SPARKLINE_WIDTH = 36
MOST_VALIDATIONS = 6  # that a row names; of more, the first ones are left out


def show_summary(run_dir: Path, *, console: Console | None = None) -> None:
    """Print the summary of a run; a frame on a terminal, else plain lines. Nothing for a run without metrics.

    console: standard error unless given.
    """
    console = console or standard_error()
    rows = summary_rows(run_dir)
    if not rows:
        return
    if console.is_terminal:
        table = Table(show_header=False)
        for name, text in rows:
            table.add_row(name, Text(text, overflow="fold"))
        console.print(table)
        return
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        console.print(f"{name:<{width}}  {text}", markup=False, highlight=False, soft_wrap=True)


def summary_rows(run_dir: Path) -> list[tuple[str, str]]:
    """Return (name, text) of what there is to say: steps, time, rewards, validation, files."""
    path = run_dir / METRICS
    try:
        records = list(read_metrics(path)) if path.is_file() else []
    except (OSError, ValueError) as error:  # a run that has ended well does not fail by what its disk did to a file
        return [("metrics", f"{path} cannot be read: {error}"), *_files(run_dir)[1:]]
    if not records:
        return []
    seconds = sum(record.metrics.get("time/step_s", 0.0) for record in records)
    rows = [("steps", str(records[-1].step)), ("time in steps", clock(seconds))]
    rewards = _points(records, "reward/mean")
    if rewards:
        values = [value for _, value in rewards]
        rows.append(("reward", f"{values[0]:.4f} -> {values[-1]:.4f}  {sparkline(values)}"))
    held_out = held_out_reward(name for record in records for name in record.metrics)
    if held_out is not None:
        validation = _points(records, held_out)
        left_out = "... " * (len(validation) > MOST_VALIDATIONS)
        shown = "  ".join(f"{step}: {value:.4f}" for step, value in validation[-MOST_VALIDATIONS:])
        of_set = held_out.removeprefix("val/").rpartition("/")[0]
        rows.append((f"validation reward{of_set and ' of '}{of_set}", left_out + shown))
    files = _files(run_dir)
    export = [("export", f"mega-rl checkpoint export {run_dir} FOLDER")] * ("checkpoint" in dict(files))
    return [*rows, *files, *export, ("page", f"mega-rl report {run_dir}"), ("plot", f"mega-rl plot {run_dir}")]


def _points(records: Sequence[StepMetrics], name: str) -> list[tuple[int, float]]:
    return [(record.step, record.metrics[name]) for record in records if name in record.metrics]


def _files(run_dir: Path) -> list[tuple[str, str]]:
    """Return what a run has left, the newest of each kind."""
    rows = [("metrics", str(run_dir / METRICS))]
    for name, folder in (("checkpoint", run_dir / "checkpoints"), ("Hugging Face model", run_dir / "hf")):
        saved = sorted(path for path in folder.glob("step_*") if path.is_dir())
        rows += [(name, str(saved[-1]))] if saved else []
    if (run_dir / "rollouts").is_dir():
        rows.append(("samples", str(run_dir / "rollouts")))
    return rows


def sparkline(values: Sequence[float], *, width: int = SPARKLINE_WIDTH) -> str:
    """Return finite values as bars between their lowest and highest, averaged down to `width` characters."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    count = min(width, len(finite))
    edges = [len(finite) * i // count for i in range(count + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, span = min(means), max(means) - min(means)
    if span == 0.0:
        return BARS[0] * count
    return "".join(BARS[min(int((mean - low) / span * len(BARS)), len(BARS) - 1)] for mean in means)
