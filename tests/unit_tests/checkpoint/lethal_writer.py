"""A background writer that takes its rank with it, and what sees its operations on files.

Run as a module: the arguments are the point, a file for the operations' names, the folder of the save, then the
writer's own. Like the writer itself it imports no torch: it starts with every run that is killed.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mega_rl import disk
from mega_rl.checkpoint.saving import job, writer

# The system calls by which a save changes the disk: `disk` makes all of them through its name `os`.
CALLS = ("mkdir", "open", "pwritev", "fsync", "rename", "unlink", "rmdir")


def instrumented(hook: Callable[[str, Callable[[], Any]], Any]) -> SimpleNamespace:
    """`os` whose calls that change the disk go through `hook(name, call)`."""

    def through(name: str) -> Callable[..., Any]:
        operation = getattr(os, name)
        return lambda *args, **kwargs: hook(name, lambda: operation(*args, **kwargs))

    return SimpleNamespace(**vars(os) | {name: through(name) for name in CALLS})


class Watch:
    """Sees what happens to files while it is armed, and calls `end` before or after one such operation."""

    def __init__(self, point: int, end: Callable[[], None]) -> None:
        self.seen: list[str] = []
        self._point, self._end = point, end

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Inside, calls are seen."""
        disk.os = instrumented(self._around)  # type: ignore[assignment]
        try:
            yield
        finally:
            disk.os = os

    def _around(self, name: str, call: Callable[[], Any]) -> Any:
        number = len(self.seen)
        self.seen.append(name)
        if 2 * number == self._point:
            self._end()
        try:
            return call()
        finally:  # to remove a missing file raises
            if 2 * number + 1 == self._point:
                self._end()


def die() -> None:
    """This process, at once."""
    os.kill(os.getpid(), signal.SIGKILL)


def lethal_writer(point: int, log: Path, folder: str, arguments: list[str]) -> None:
    """Write as the background writer does; at a point of the save into `folder` kill the rank and this process."""

    def end() -> None:
        os.kill(os.getppid(), signal.SIGKILL)
        die()

    watch = Watch(point, end)
    perform = job.perform

    def watched(one: job.SaveJob, *args: Any, **kwargs: Any) -> Any:
        if folder not in one.folder:
            return perform(one, *args, **kwargs)
        with watch.armed():
            outcome = perform(one, *args, **kwargs)
        log.write_text(" ".join(watch.seen))
        return outcome

    writer.perform = watched  # type: ignore[assignment]
    writer.main(arguments)


if __name__ == "__main__":
    lethal_writer(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
