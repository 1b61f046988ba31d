"""End of work that a signal interrupts at once, as it has no steps to finish. Imports no torch."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StoppedBySignal(KeyboardInterrupt):
    """End of a command by a signal; no Exception, so that nothing on its way takes it for a failure."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = signal.Signals(number)

    @property
    def exit_code(self) -> int:
        """Exit code that a shell expects after the signal: 128 plus its number."""
        return 128 + self.signal


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """Raise StoppedBySignal in the block on SIGTERM, SIGUSR1 and Ctrl-C.

    What closes files and servers on the way out is not interrupted again, except by another Ctrl-C. A trainer in the
    block answers signals itself while it is open: its step in progress ends first. Outside the main thread, where
    Python sets no handlers, the block changes nothing.
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
