"""Signals to a launcher, remembered until it hands them on."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType

# Slurm sends SIGUSR1 ahead of time; SIGHUP and SIGQUIT end ranks without a checkpoint, as they end any program.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)
STOPPED = tuple(128 + number for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1))  # ranks that have saved


class StopSignals:
    """Signals to this process, in their order, while it is a context manager's body.

    One that the process was started to ignore, as SIGHUP under nohup, stays ignored. Signals that were blocked until
    now are let through.
    """

    def __init__(self, numbers: Sequence[signal.Signals] = SIGNALS) -> None:
        self.first = 0
        self._numbers = numbers
        self._pending: list[int] = []
        self._previous: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> StopSignals:
        numbers = [number for number in self._numbers if signal.getsignal(number) is not signal.SIG_IGN]
        self._previous = {number: signal.signal(number, self._remember) for number in numbers}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._numbers)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def take(self) -> list[int]:
        """Return the signals that have come since the last call."""
        taken, self._pending = self._pending, []
        return taken

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.first = self.first or number
        self._pending.append(number)


@contextmanager
def blocked() -> Iterator[None]:
    """Block SIGNALS inside: they come afterwards, and programs that are started inside never get them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
