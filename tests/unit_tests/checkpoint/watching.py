"""What sees the operations of saves on files, and can end the process at one of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from mega_rl import disk

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
