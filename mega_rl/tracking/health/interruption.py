"""Interrupt work on a signal at once: for commands that have no step to finish first."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StoppedBySignal(KeyboardInterrupt):
    """A signal ended the command. Not an Exception, so that no handler takes it for a failure."""

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
