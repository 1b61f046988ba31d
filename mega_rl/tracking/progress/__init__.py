"""Phases: named pieces of work, nested, that a listener may show while they last.

Works as logging does. Code that loads, generates or saves opens a phase and knows nothing of terminals. Without a
listener (in a library, in tests, on ranks other than 0) nothing is shown. Imports only the standard library.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mega_rl.tracking.progress.terminal import Display

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Phase:
    """A piece of work in progress: its name and the part that is done. A `with` block ends it.

    `rounds` marks work that repeats: `done` counts whole rounds, and other phases run inside a round.
    """

    name: str
    total: float | None = None
    done: float = 0.0
    unit: str = ""  # "B" for bytes
    deadline_s: float | None = None  # seconds after which the waiting code gives up
    rounds: bool = False
    note: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self.first = self.done  # work done before the phase began
        self.began = self.advanced = time.monotonic()  # `advanced`: time of the last progress
        self.thread = threading.get_ident()
        self._lock = threading.Lock()

    def __enter__(self) -> Phase:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """End the phase; an error keeps the phases in progress."""
        if error is not None and _PHASES not in vars(error):
            setattr(error, _PHASES, active())
        self.end()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the phase began."""
        return time.monotonic() - self.began

    def advance(self, amount: float = 1.0) -> None:
        """Add to the work done; from any thread."""
        with self._lock:
            self.done += amount
            self.advanced = time.monotonic()

    def report(self, done: float, total: float | None = None, *, unit: str | None = None, note: str = "") -> None:
        """Set the work done, and the total if it is known by now; from any thread."""
        self.done, self.note = done, note
        self.total = self.total if total is None else total
        self.unit = self.unit if unit is None else unit

    def end(self) -> None:
        """End the phase; a second call does nothing."""
        with _lock:
            if self not in _active:
                return
            _active.remove(self)
        _tell_listener()


_PHASES = "_mega_rl_phases"  # attribute of an error that has left a phase
_lock = threading.Lock()
_active: list[Phase] = []
_listener: Display | None = None


def listen(listener: Display | None) -> None:
    """Show phases from now on with `listener` instead of the current one; None shows nothing."""
    global _listener
    with _lock:
        before, _listener = _listener, listener
    if before is not None:
        before.close()
    _tell_listener()


def close() -> None:
    """Remove the live line and stop showing phases."""
    listen(None)


def _tell_listener() -> None:
    with _lock:
        listener, phases = _listener, tuple(_active)
    if listener is not None:
        listener.changed(phases)


def show_progress(*, live: bool = True) -> None:
    """Show phases and logs on this terminal; see `terminal.show_progress`, which imports rich."""
    from mega_rl.tracking.progress import terminal

    terminal.show_progress(live=live)


def active() -> tuple[Phase, ...]:
    """Return the phases in progress, the outermost first."""
    with _lock:
        return tuple(_active)


def active_at(error: BaseException) -> tuple[Phase, ...]:
    """Return the phases that an error has left, else the current ones."""
    phases: tuple[Phase, ...] = vars(error).get(_PHASES, ()) or active()
    return phases


def phase(
    name: str,
    *,
    total: float | None = None,
    done: float = 0.0,
    unit: str = "",
    deadline_s: float | None = None,
    rounds: bool = False,
    announce: bool = False,
) -> Phase:
    """Begin a phase, which a `with` block or its owner ends. announce: also log its name."""
    begun = Phase(name, total=total, done=done, unit=unit, deadline_s=deadline_s, rounds=rounds)
    if announce:
        log.info("%s", begun.name)
    with _lock:
        _active.append(begun)
    _tell_listener()
    return begun


def rounds(name: str, total: int, *, done: int = 0) -> Phase:
    """Begin work of `total` rounds, whose owner advances the phase after each."""
    return phase(name, total=total, done=done, rounds=True)


@contextmanager
def importing(names: str, *, announce: bool = False) -> Iterator[Phase]:
    """Show the block, which imports modules, as the phase "importing NAMES".

    Python collects no garbage meanwhile, and later collections skip all objects of the imports: PyTorch and
    Megatron-Core make half a million objects that stay. Collecting them takes a sixth of the time of the imports, and
    0.3 s of each full collection of the run.
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


def _innermost() -> Phase | None:
    thread = threading.get_ident()
    return next((phase for phase in reversed(active()) if phase.thread == thread and not phase.rounds), None)


def report(done: float, total: float | None = None, *, unit: str = "") -> None:
    """Set the work done in the innermost phase of this thread; outside of phases do nothing."""
    if (innermost := _innermost()) is not None:
        innermost.report(done, total, unit=unit)


def counter(total: float) -> Callable[[float], None]:
    """Return a function that adds bytes to this thread's innermost phase, from any thread."""
    innermost = _innermost()
    if innermost is None:
        return lambda amount: None
    innermost.report(0.0, total, unit="B")
    return innermost.advance


def note(text: str) -> None:
    """Set the word next to the innermost phase of this thread; outside of phases do nothing."""
    if (innermost := _innermost()) is not None:
        innermost.note = text


def printable(text: str) -> str:
    """Return a text on one line: ESC as \\x1b, line ends as \\n.

    Texts of policies, files and programs could otherwise move the cursor, or look like lines of the log.
    """
    return "".join(c if c.isprintable() or c in "\t\u00a0\u3000" else repr(c)[1:-1] for c in text)


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table: the first column to the left, numbers to the right."""
    padded = []
    for number, (title, *cells) in enumerate(zip(head, *rows, strict=True)):
        width = max(map(len, [title, *cells]))
        is_number = number > 0 and all(cell[:1].isdigit() or cell in ("-", "") for cell in cells)
        padded.append([cell.rjust(width) if is_number else cell.ljust(width) for cell in (title, *cells)])
    yield from ("  ".join(row).rstrip() for row in zip(*padded, strict=True))
