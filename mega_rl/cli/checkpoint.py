"""`mega-rl checkpoint`: the command line of `mega_rl.checkpoint.maintenance`. Imports no torch but to verify."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mega_rl.checkpoint import maintenance as verbs
from mega_rl.checkpoint.memory.leftovers import list_memory
from mega_rl.cli.help import Commands

app = Commands(name="checkpoint", help="List, verify, export and remove the checkpoints of a run.")

Run = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder (trainer.run_dir), or its checkpoints folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list")
def list_(
    run: Run,
    metric: Annotated[
        str, typer.Option("--metric", help="Show this metric; default: that of checkpoint.keep_best.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Step, time, size, layout and state of every checkpoint. Exit code 1 if files of one are missing or short."""
    raise typer.Exit(verbs.list_checkpoints(run, metric=metric, as_json=as_json))


@app.command()
def verify(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="Run folder, or one checkpoint.")],
    as_json: AsJson = False,
) -> None:
    """Read every byte and compare all checksums. Exit code 1 if any differs."""
    raise typer.Exit(verbs.verify_checkpoints(path, as_json=as_json))


@app.command()
def prune(
    run: Run,
    keep: Annotated[int, typer.Option("--keep", help="Newest whole checkpoints kept.")],
    keep_interval: Annotated[
        int, typer.Option("--keep-interval", help="Also keep those whose step is a multiple of this.")
    ] = 0,
    keep_best: Annotated[
        str, typer.Option("--keep-best", help="Also keep the one with the largest value of this metric.")
    ] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove old checkpoints, and what torn saves have left; never the newest whole one, which is read to be sure."""
    raise typer.Exit(
        verbs.prune(run, keep=keep, keep_interval=keep_interval, keep_best=keep_best, dry_run=dry_run, as_json=as_json)
    )


@app.command()
def memory(
    run: Annotated[Path | None, typer.Argument(metavar="[RUN]", help="Run folder; default: all of this user.")] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove them, but for those of runs that go on.")] = False,
    as_json: AsJson = False,
) -> None:
    """Checkpoints that runs which did not end cleanly have left in the memory of this host (/dev/shm)."""
    raise typer.Exit(list_memory(run, remove=remove, as_json=as_json))
