"""Longest call of a reward. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class SlowestCall:
    """Seconds of the longest call since the last `take`; one thread adds."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def add(self, seconds: float) -> None:
        """Record a call."""
        self._seconds = max(self._seconds, seconds)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Record the block as a call, however it ends."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.add(time.perf_counter() - begin)

    def take(self) -> float:
        """Return the seconds and begin anew; 0 without a call."""
        taken, self._seconds = self._seconds, 0.0
        return taken
