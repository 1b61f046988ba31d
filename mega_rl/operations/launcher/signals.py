"""Remember signals to a launcher until it passes them on to its ranks."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from types import FrameType, TracebackType

# Slurm sends SIGUSR1 before the time limit; SIGHUP and SIGQUIT end ranks without a checkpoint, as they end any program.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)
STOPPED = tuple(128 + number for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1))  # ranks that have saved


class StopSignals:
    """Context manager that collects the signals to this process in their order.

    A signal that the process ignored at its start, as SIGHUP under nohup, stays ignored. Signals blocked before are let
    through.
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
        """Return the signals that came since the last call."""
        taken, self._pending = self._pending, []
        return taken

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.first = self.first or number
        self._pending.append(number)
