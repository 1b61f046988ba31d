"""Tables of a run on the terminal: its models at the start, its outcome."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from mega_rl.errors import UserError
from mega_rl.tracking.metrics.records import held_out_reward, read_series
from mega_rl.tracking.progress import aligned
from mega_rl.tracking.progress.terminal import clock, standard_error

METRICS = "metrics.jsonl"
BARS = "▁▂▃▄▅▆▇█"
SPARKLINE_WIDTH = 36
MOST_VALIDATIONS = 6  # in a row; earlier ones are left out
_UNITS = ((1_000_000_000_000, "T"), (1_000_000_000, "B"), (1_000_000, "M"), (1_000, "K"))


@dataclass(frozen=True)
class RoleFacts:
    """Model of a role, as the table shows it: a column for each field."""

    role: str  # "actor"
    family: str = ""  # config.json's model_type; empty if the role has no model
    parameters: int | None = None  # number in the whole model
    engine: str = ""  # "megatron" or "fsdp"
    layout: str = ""  # "tp2 dp2"
    attention: str = ""  # the kernels that run: "sdpa", "te: flash"
    dtype: str = ""  # dtype of computation
    trains: bool = False
    model: str = ""  # a checkpoint directory, a function, an address


def show_startup(roles: Sequence[RoleFacts], *, prompts: str = "", stop_tokens: str = "") -> None:
    """Print a line for each of the run's roles; empty columns are left out.

    For one rank only. prompts, stop_tokens: texts of the last lines, about how prompts are written and where a response
    ends.
    """
    rows = [[column.name for column in fields(RoleFacts)]]
    for role in roles:
        parameters = "" if role.parameters is None else short_count(role.parameters)
        cells = {**vars(role), "parameters": parameters, "trains": "yes" if role.trains else "no"}
        rows.append([str(cell) for cell in cells.values()])
    shown = [column for column in zip(*rows, strict=True) if any(column[1:])]
    head, *filled = ([cell or "-" for cell in row] for row in zip(*shown, strict=True))
    lines = [*aligned(head, filled)]
    lines += [f"prompts: {prompts}"] * bool(prompts) + [f"responses end at {stop_tokens}"] * bool(stop_tokens)
    _print_lines(lines)


def short_count(number: int) -> str:
    """Return a number with three digits: "494M" or "7.62B"."""
    for size, unit in _UNITS:
        if number >= size - size // 2000:  # rounds up to 1 of the unit
            digits = number / size
            return f"{digits:.{2 if digits < 9.995 else 1 if digits < 99.95 else 0}f}{unit}"
    return str(number)


def show_summary(run_dir: Path) -> None:
    """Print the summary of a run with metrics."""
    rows = summary_rows(run_dir)
    width = max((len(name) for name, _ in rows), default=0)
    _print_lines([f"{name:<{width}}  {text}" for name, text in rows])


def _print_lines(lines: Sequence[str]) -> None:
    for line in lines:
        standard_error().print(line, markup=False, highlight=False, soft_wrap=True)


def summary_rows(run_dir: Path) -> list[tuple[str, str]]:
    """Return (name, text) of each row: steps, time, rewards, validation, files."""
    path = run_dir / METRICS
    try:
        series = read_series(path) if path.is_file() else {}
    except UserError as error:  # the run has ended well, so a damaged file must not fail it
        return [("metrics", str(error)), *_files(run_dir)[1:]]
    if not series:
        return []
    last = max(one.steps[-1] for one in series.values())
    seconds = sum(series["time/step_s"].values) if "time/step_s" in series else 0.0
    rows = [("steps", str(last)), ("time in steps", clock(seconds))]
    if "reward/mean" in series:
        values = series["reward/mean"].values
        rows.append(("reward", f"{values[0]:.4f} -> {values[-1]:.4f}  {sparkline(values)}"))
    held_out = held_out_reward(series)
    if held_out is not None:
        named = held_out.removeprefix("val/").rpartition("/")[0]
        steps, values = series[held_out].steps, series[held_out].values
        shown = [f"{step}: {value:.4f}" for step, value in zip(steps, values, strict=True)][-MOST_VALIDATIONS:]
        left_out = "... " * (len(steps) > MOST_VALIDATIONS)
        rows.append((f"validation reward{named and ' of '}{named}", left_out + "  ".join(shown)))
    files = _files(run_dir)
    export = [("export", f"mega-rl checkpoint export {run_dir} FOLDER")] * ("checkpoint" in dict(files))
    return [*rows, *files, *export, ("page", f"mega-rl report {run_dir}")]


def _files(run_dir: Path) -> list[tuple[str, str]]:
    """List a run's newest files: metrics, checkpoint, Hugging Face model, samples."""
    rows = [("metrics", str(run_dir / METRICS))]
    for name, folder in (("checkpoint", run_dir / "checkpoints"), ("Hugging Face model", run_dir / "hf")):
        saved = sorted(path for path in folder.glob("step_*") if path.is_dir())
        rows += [(name, str(saved[-1]))] if saved else []
    if (run_dir / "rollouts").is_dir():
        rows.append(("samples", str(run_dir / "rollouts")))
    return rows


def sparkline(values: Sequence[float]) -> str:
    """Return finite values as bars between their lowest and highest, averaged down to SPARKLINE_WIDTH characters."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    count = min(SPARKLINE_WIDTH, len(finite))
    edges = [len(finite) * i // count for i in range(count + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, span = min(means), max(means) - min(means)
    if span == 0.0:
        return BARS[0] * count
    return "".join(BARS[min(int((mean - low) / span * len(BARS)), len(BARS) - 1)] for mean in means)
