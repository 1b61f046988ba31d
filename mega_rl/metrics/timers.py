"""Wall-clock times of the phases of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mega_rl import progress
from mega_rl.types import Metrics


def _nothing_to_wait_for() -> None:
    """Do nothing, for devices that have finished when a call returns."""


class PhaseTimer:
    """Wall-clock seconds of each named phase of a step, and how much of the step the phases cover.

    A step lasts from one call of `metrics` (or `reset`) to the next, so nothing between two steps is lost: what is
    timed after `metrics` was read, such as writing them, belongs to the following step.
    """

    def __init__(
        self,
        *,
        synchronize: Callable[[], None] = _nothing_to_wait_for,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """synchronize: waits for the accelerator; called at both ends of each phase."""
        self._synchronize = synchronize
        self._clock = clock
        self._running: str | None = None
        self._seconds: dict[str, float] = {}
        self._step_start = clock()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block as `name` and show it as progress; entering a phase twice in one step adds up.

        Raises RuntimeError when nested.
        """
        if self._running is not None:
            raise RuntimeError(
                f"phase {name!r} starts inside phase {self._running!r}: phases add up, so they do not nest"
            )
        self._synchronize()
        self._running = name
        start = self._clock()
        try:
            with progress.phase(name.replace("_", " ")):
                yield
                self._synchronize()
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - start
            self._running = None

    def reset(self) -> None:
        """Begin a step now, forgetting what was timed."""
        assert self._running is None, f"step ends inside phase {self._running!r}"
        self._seconds = {}
        self._step_start = self._clock()

    def metrics(self) -> Metrics:
        """`time/<phase>_s` of each phase, `time/step_s` and `time/coverage` (share of the step); begins a step."""
        step_s = self._clock() - self._step_start
        covered = sum(self._seconds.values())
        record = {f"time/{name}_s": seconds for name, seconds in self._seconds.items()}
        record["time/step_s"] = step_s
        record["time/coverage"] = covered / step_s if step_s > 0.0 else 1.0
        self.reset()
        return record
