"""End of a rank that fails: last words, and one line for the backend's error."""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeAlias

from mega_rl.errors import PeerError, RunError, StalledError, UserError
from mega_rl.tracking.health.heartbeat import Heartbeat, RankFacts, place_of_error
from mega_rl.tracking.health.records import INNOCENT_CODES, LastWords, kind_of

Investigate: TypeAlias = Callable[[RankFacts, str], str | None]


@contextmanager
def guarded(heartbeat: Heartbeat, investigate: Investigate | None = None) -> Iterator[None]:
    """Write the last words of a rank that fails inside.

    An error caused by another rank becomes a PeerError of one line, a HungError a RunError. investigate: returns the
    cause, if known, from this rank and its traceback.
    """
    try:
        yield
    except BaseException as error:
        if heartbeat.ended is not None:  # a guard further inside has written the last words
            raise
        text = str(error) or type(error).__name__
        if isinstance(error, SystemExit):  # from user code or a library; code 0 would mean success
            place = place_of_error(error)
            where = "" if place is None else f" (at {place.file}:{place.line} in {place.function})"
            text = f"SystemExit({error.code}) was raised inside of the run{where}"
        words = heartbeat.end(kind_of(error), text, error=error)
        if isinstance(error, UserError) and words.step is None:
            heartbeat.withdraw()
        if isinstance(error, SystemExit):
            raise RunError(text) from error
        if words.kind not in (*INNOCENT_CODES, "hung"):
            raise
        own = "".join(traceback.format_exception(error))
        cause = None if investigate is None else investigate(heartbeat.facts, own)
        if words.kind == "hung":
            raise RunError(cause or str(error)) from error
        line = str(error) if isinstance(error, StalledError) else _line_of(words, heartbeat.facts.timeout_s)
        raise PeerError(cause or line) from error


def in_phase(phase: str, steps_done: int | None) -> str:
    """Return " in 'reward' of step 3", without the part that is unknown."""
    step = "" if steps_done is None else f" of step {steps_done + 1}"
    return f" in {phase!r}{step}" if phase else f" between phases{step}" if step else ""


def _line_of(words: LastWords, timeout_s: float) -> str:
    """Return the message of a rank that failed because of another rank."""
    where = in_phase(words.phase, words.step)
    call = "" if words.waiting is None else f" in {words.waiting}"
    if words.kind == "timeout":
        return f"waited {timeout_s:g} s (trainer.timeout_s){call}{where} for a rank that did not come"
    lost = f"lost the connection to another rank{call}{where}"
    return f"{lost}: it has ended, and what it said, if anything, is the cause"


# SIGUSR1 is what Slurm sends ahead of time, `--signal=B:USR1@120`.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StoppedBySignal(KeyboardInterrupt):
    """A signal ended the command. Not an Exception: no handler takes it for a failure."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = signal.Signals(number)

    @property
    def exit_code(self) -> int:
        """Return 128 plus the signal's number, as a shell expects."""
        return 128 + self.signal


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """Raise StoppedBySignal in the block on SIGTERM, SIGUSR1 and Ctrl-C.

    Afterwards only another Ctrl-C interrupts the code that closes files and servers. A trainer in the block handles
    signals itself while it is open, and ends its step first. Outside the main thread the block changes nothing.
    """
    numbers = SIGNALS if threading.current_thread() is threading.main_thread() else ()
    previous = {number: signal.signal(number, _stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _stop(number: int, frame: FrameType | None) -> None:
    for again in SIGNALS:
        if again != signal.SIGINT:
            signal.signal(again, signal.SIG_IGN)
    raise StoppedBySignal(number)
