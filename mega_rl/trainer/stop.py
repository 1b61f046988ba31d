"""Ending a run cleanly on SIGTERM, SIGUSR1 and Ctrl-C."""

from __future__ import annotations

import signal
from types import FrameType

import torch

from mega_rl.protocols import Ranks

# SIGUSR1 is what Slurm sends ahead of time, `--signal=B:USR1@120`.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopRequest:
    """Remembers the last of `SIGNALS`, so that the step in progress can end; a second SIGINT interrupts at once.

    Ranks get their signals at different times, or only one does, so `__call__` asks all of them: either every rank
    stops after this step or none does. Collective over `ranks`.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._received = 0  # by this rank
        self._agreed = 0  # by all: what the last question found anywhere
        self._previous = {number: signal.signal(number, self._remember) for number in SIGNALS}

    def __call__(self) -> bool:
        """Whether any rank has been asked to stop."""
        # A signal that comes while the ranks talk stays in `_received`, for the next question.
        self._agreed = int(self._ranks.max(torch.tensor(self._received)))
        return self._agreed != 0

    @property
    def exit_code(self) -> int:
        """What a shell expects of a process ended this way: 128 plus the signal's number; 0 without a signal."""
        return 128 + self._agreed if self._agreed else 0

    def restore(self) -> None:
        """Put the handlers back that were there before."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self._received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._received = number
