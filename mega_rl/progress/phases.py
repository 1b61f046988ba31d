"""Phases: named pieces of work, nested, that a listener may show while they last."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

log = logging.getLogger(__name__)


class Phase:
    """A piece of work that has begun: its name and, where it can be counted, how much of it is done.

    `rounds` marks work that repeats: `done` counts whole rounds, and other phases run inside one.
    """

    def __init__(
        self,
        name: str,
        *,
        total: float | None = None,
        done: float = 0.0,
        unit: str = "",
        deadline_s: float | None = None,
        rounds: bool = False,
    ) -> None:
        """unit: of `total` and `done`, "B" for bytes. deadline_s: seconds after which whoever waits gives up."""
        self.name = name
        self.total = total
        self.done = done
        self.first = done  # what was done before the phase began
        self.unit = unit
        self.note = ""
        self.deadline_s = deadline_s
        self.rounds = rounds
        self.began = time.monotonic()
        self.advanced = self.began  # when something was last done
        self.thread = threading.get_ident()
        self._lock = threading.Lock()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the phase began."""
        return time.monotonic() - self.began

    def advance(self, amount: float = 1.0) -> None:
        """Add to what is done; from any thread."""
        with self._lock:
            self.done += amount
            self.advanced = time.monotonic()

    def report(self, done: float, total: float | None = None, *, unit: str | None = None, note: str = "") -> None:
        """Set what is done, and what there is to do where that is known by now; from any thread."""
        self.done = done
        self.total = self.total if total is None else total
        self.unit = self.unit if unit is None else unit
        self.note = note

    def end(self) -> None:
        """End the phase; again is harmless."""
        with _lock:
            if self not in _active:
                return
            _active.remove(self)
            listener, left = _listener, tuple(_active)
        if listener is not None:
            listener.changed(left)


class Listener(Protocol):
    """Receiver of phases as they begin, advance and end."""

    def changed(self, phases: tuple[Phase, ...]) -> None:
        """Take the phases in progress, the outermost first, after one has begun or ended."""
        ...

    def close(self) -> None:
        """Stop showing phases."""
        ...


_PHASES = "_mega_rl_phases"  # attribute of an error that has left a phase
_lock = threading.Lock()
_active: list[Phase] = []
_listener: Listener | None = None


def listen(listener: Listener | None) -> None:
    """Show phases from now on with `listener`, in place of the one before; None shows nothing."""
    global _listener
    with _lock:
        before, _listener = _listener, listener
        phases = tuple(_active)
    if before is not None:
        before.close()
    if listener is not None:
        listener.changed(phases)


def close() -> None:
    """Take away what is shown."""
    listen(None)


def active() -> tuple[Phase, ...]:
    """Return the phases in progress, the outermost first."""
    with _lock:
        return tuple(_active)


def active_at(error: BaseException) -> tuple[Phase, ...]:
    """Return the phases that were in progress when an error was raised; those of now if it has left none."""
    phases: tuple[Phase, ...] = vars(error).get(_PHASES, ()) or active()
    return phases


def begin(
    name: str, *, total: float | None = None, unit: str = "", deadline_s: float | None = None, announce: bool = False
) -> Phase:
    """Begin a phase that its owner ends, maybe on another thread. announce: the log gets a line with its name."""
    return _begin(Phase(name, total=total, unit=unit, deadline_s=deadline_s), announce=announce)


@contextmanager
def phase(
    name: str, *, total: float | None = None, unit: str = "", deadline_s: float | None = None, announce: bool = False
) -> Iterator[Phase]:
    """Show the block as a phase. announce: the log gets a line with its name, for what happens once in a run."""
    begun = begin(name, total=total, unit=unit, deadline_s=deadline_s, announce=announce)
    with _ending(begun):
        yield begun


@contextmanager
def importing(names: str, *, announce: bool = False) -> Iterator[Phase]:
    """Show the block, in which modules are imported, as the phase "importing NAMES".

    Python collects no garbage meanwhile, and later collections pass over all that is there at its end: the imports of
    PyTorch and Megatron-Core make half a million objects that stay, and walking them again and again takes a sixth of
    the time of the imports, and 0.3 s of each full collection of the run.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with phase(f"importing {names}", announce=announce) as begun:
            yield begun
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


@contextmanager
def rounds(name: str, total: int, *, done: int = 0) -> Iterator[Phase]:
    """Show the block as `total` rounds of which `done` were done before; its owner advances it after each."""
    begun = _begin(Phase(name, total=total, done=done, rounds=True), announce=False)
    with _ending(begun):
        yield begun


def report(done: float, total: float | None = None, *, unit: str = "", note: str = "") -> None:
    """Say how far the innermost phase of this thread is; nothing outside of phases."""
    innermost = _innermost()
    if innermost is not None:
        innermost.report(done, total, unit=unit, note=note)


def counter(total: float, *, unit: str = "") -> Callable[[float], None]:
    """Return what adds to the innermost phase of this thread, from any thread; the count to `total` begins anew."""
    innermost = _innermost()
    if innermost is None:
        return lambda amount: None
    innermost.report(0.0, total, unit=unit)
    return innermost.advance


def note(text: str) -> None:
    """Put a word beside the innermost phase of this thread, in place of the one before; nothing outside of phases."""
    innermost = _innermost()
    if innermost is not None:
        innermost.note = text


def _innermost() -> Phase | None:
    thread = threading.get_ident()
    with _lock:
        return next((phase for phase in reversed(_active) if phase.thread == thread and not phase.rounds), None)


@contextmanager
def _ending(begun: Phase) -> Iterator[None]:
    """End a phase with the block; an error that leaves it keeps the phases that were in progress."""
    try:
        yield
    finally:
        error = sys.exception()
        if error is not None and _PHASES not in vars(error):
            setattr(error, _PHASES, active())
        begun.end()


def _begin(begun: Phase, *, announce: bool) -> Phase:
    if announce:
        log.info("%s", begun.name)
    with _lock:
        _active.append(begun)
        listener, phases = _listener, tuple(_active)
    if listener is not None:
        listener.changed(phases)
    return begun
