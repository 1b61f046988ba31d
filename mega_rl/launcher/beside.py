"""Calls on threads of their own, for files on a file system that may hang: a launcher has signals to hand on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Generic, TypeVar, cast

from mega_rl.threads import Running

log = logging.getLogger(__name__)

Result = TypeVar("Result")


def within(seconds: float, call: Callable[[], Result], *, otherwise: Result, name: str) -> Result:
    """Return what a call returns, or `otherwise`, with a warning, where that takes longer.

    Raises what the call raises. name: of the call in the warning, "reading run/health".
    """
    running = Running(call, name=name)
    if running.wait(seconds):
        log.warning("%s takes longer than %g s: does the file system hang?", name, seconds)
        return otherwise
    return _outcome(running)


class RepeatedCall(Generic[Result]):
    """A call that is made again and again, one at a time."""

    def __init__(self, call: Callable[[], Result], *, patience_s: float, clock: Callable[[], float]) -> None:
        """patience_s: that one `make` waits for the result."""
        self._call, self._patience_s, self._clock = call, patience_s, clock
        self._running: Running[Result] | None = None
        self._begun = 0.0

    def make(self) -> tuple[Result | None, float]:
        """Return (the result, seconds that the call has taken so far); None while it runs. Raises what it raises."""
        if self._running is None:
            self._running, self._begun = Running(self._call, name="repeated call"), self._clock()
        running, seconds = self._running, self._clock() - self._begun
        if running.wait(self._patience_s):
            return None, seconds
        self._running = None
        return _outcome(running), seconds


def _outcome(running: Running[Result]) -> Result:
    if running.error is not None:
        raise running.error
    return cast(Result, running.result)
