"""The launcher of one node as a program: `python -m mega_rl.cli.launcher LAUNCH`, a `Launch` in JSON."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from mega_rl.checkpoint.folders import CHECKPOINTS, complete
from mega_rl.checkpoint.memory import place
from mega_rl.environment import python_module
from mega_rl.errors import UserError
from mega_rl.operations.launcher.launch import Launch, launch
from mega_rl.operations.launcher.reaper import SIGNALS
from mega_rl.tracking import progress
from mega_rl.tracking.progress.terminal import show_progress


def become(settings: Launch) -> NoReturn:
    """Replace this process by a launcher, which gets the signals and gives the exit code."""
    progress.close()
    sys.stdout.flush()
    sys.stderr.flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # a signal that comes now waits until the launcher takes it
    os.execve(sys.executable, command(settings), os.environ)


def command(settings: Launch) -> list[str]:
    """Return the command that runs a launch as a process."""
    return python_module("mega_rl.cli.launcher", settings.to_json())


def newest_checkpoints(run_dir: Path, *, shm: Path = place.SHM) -> tuple[str, str]:
    """Return a run's newest complete checkpoints, NAME@TIME: (on disk, in memory); "" for none."""
    root = run_dir / CHECKPOINTS
    history = place.read_history(root)
    if not history:
        return _newest_in(root), ""
    folder = place.folder_of(shm, os.path.realpath(run_dir), history)
    return _newest_in(root), "" if place.unusable(folder) else _newest_in(folder)


def _newest_in(folder: Path) -> str:
    try:
        folders = complete(folder)
        return f"{folders[-1].name}@{folders[-1].stat().st_mtime_ns}" if folders else ""
    except (OSError, UserError):  # the ranks say what is wrong with the folder
        return ""


def main(argument: str) -> int:
    """Run the launcher and return its exit code."""
    settings = Launch.parse(argument)
    show_progress(live=False, beside_ranks=True)
    try:
        return launch(settings, newest=newest_checkpoints)
    finally:
        progress.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
