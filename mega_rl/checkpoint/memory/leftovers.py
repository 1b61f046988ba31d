"""`mega-rl checkpoint memory`: what this user's runs hold in the memory of this host, and its removal. No torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import typer

from mega_rl.checkpoint import folders
from mega_rl.checkpoint.lock import LOCK_FILE
from mega_rl.checkpoint.memory import place
from mega_rl.checkpoint.previous import CHECKPOINTS
from mega_rl.errors import UserError, in_units
from mega_rl.storage.lock import lock_file
from mega_rl.storage.strict_json import shorten


def list_memory(run: Path | None, *, remove: bool = False, as_json: bool = False, shm: Path = place.SHM) -> int:
    """Show or remove what a run, or all runs of this user, hold in this host's memory; returns the exit code.

    What a run uses, by its lock, is not removed. Raises UserError for a folder that is not this user's alone.
    """
    if why := place.unusable(place.user_folder(shm) / "run"):
        raise UserError(f"{why}; it is not looked into, ask who has made it")
    rows = []
    for folder in place.folders_of_runs(shm):
        run_dir = place.run_dir_of(folder)
        if run is not None and run_dir != os.path.realpath(run):
            continue
        with _unused(run_dir) as unused:
            state = "in use" if not unused else "removed" if remove else "left"
            steps = [folders.step_of(path) for path in folders.complete(folder)]
            nbytes = _bytes(folder)
            if remove and unused:
                place.remove(folder)
        rows.append({"path": str(folder), "run": run_dir, "steps": steps, "bytes": nbytes, "state": state})
        if not as_json:
            named = ", ".join(map(str, steps)) or "none"
            of = shorten(run_dir) or "an unknown run"
            typer.echo(f"{folder}: of {of}: steps {named}, {in_units(nbytes)}: {state}")
    if as_json:
        typer.echo(json.dumps({"memory": rows}))
    elif not rows:
        typer.echo(f"{place.user_folder(shm)}: no checkpoints in memory")
    return 0


@contextmanager
def _unused(run_dir: str) -> Iterator[bool]:
    """Yield whether no run has the lock of a run folder; meanwhile none can take it."""
    path = Path(run_dir) / CHECKPOINTS / LOCK_FILE
    if not run_dir or not os.path.lexists(path):
        yield True
        return
    try:
        fd = lock_file(path)
    except OSError:  # held, or not to be opened: nobody can say that it is free
        yield False
        return
    try:
        yield True
    finally:
        os.close(fd)


def _bytes(folder: Path) -> int:
    """Return the bytes of memory that a folder takes: of sparse files what is there."""
    nbytes = 0
    for parent, names, files in os.walk(folder):  # a run in use removes files meanwhile
        for name in (*names, *files):
            with suppress(OSError):
                nbytes += os.lstat(os.path.join(parent, name)).st_blocks * 512
    return nbytes
