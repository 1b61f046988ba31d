"""`mega-rl plot`: the curves of runs as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mega_rl.errors import UserError
from mega_rl.tracking import progress
from mega_rl.tracking.metrics.plot import plot_runs

METRICS = "metrics.jsonl"
PICTURE = "curves.png"
FORMATS = (".png", ".svg", ".pdf")


def plot(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run folders, or files as metrics.jsonl.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="Picture to write: .png, .svg or .pdf; else curves.png in the run.")
    ] = None,
    metrics: Annotated[
        str, typer.Option("--metrics", metavar="NAME,...", help="Metrics to draw, a panel each; else the usual ones.")
    ] = "",
    smooth: Annotated[
        float,
        typer.Option(
            "--smooth", min=0.0, max=0.999, help="Weight of the past in an exponential moving average; 0 draws raw."
        ),
    ] = 0.0,
) -> None:
    """Draw the curves of a run, or of several runs in the same panels."""
    files = [_metrics_of(run) for run in runs]
    picture = out or files[0].parent / PICTURE
    if picture.suffix not in FORMATS:
        raise UserError(f"--out={picture}: must end in {', '.join(FORMATS)}")
    progress.show_progress()
    with progress.phase("drawing"):
        names = [name.strip() for name in metrics.split(",") if name.strip()]
        plot_runs({_label(file): file for file in files}, picture, names=names, smooth=smooth)
    typer.echo(str(picture))


def _metrics_of(run: Path) -> Path:
    """Return the metrics file of a run. Raises UserError."""
    file = run / METRICS if run.is_dir() else run
    if not file.is_file():
        reason = f"has no {METRICS}" if run.is_dir() else "no such file or folder"
        raise UserError(f"{run}: {reason}; give the folder of a run (trainer.run_dir)")
    return file


def _label(file: Path) -> str:
    """Return what a legend calls the run of a metrics file."""
    return str(file.parent) if file.name == METRICS else str(file)
