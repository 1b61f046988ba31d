"""Clean end of a run on SIGTERM, SIGUSR1 and Ctrl-C."""

from __future__ import annotations

import logging
import os
import signal
import threading
from types import FrameType

import torch

from mega_rl.protocols import Ranks
from mega_rl.tracking import progress

log = logging.getLogger(__name__)

# SIGUSR1 is what Slurm sends ahead of time, `--signal=B:USR1@120`.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

INTERRUPTED = b"\r\x1b[2Kinterrupted: ended at once, without a checkpoint of the step in progress\n"


class StopRequest:
    """The last of `SIGNALS` that came: the step ends first. A second SIGINT interrupts at once.

    Ranks get their signals at different times, or only one does, so `__call__` asks all of them: either every rank
    stops after this step or none does. Collective over `ranks`. Outside the main thread, where Python sets no handlers,
    there is never a request.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._received = 0  # signal number of this rank
        self._agreed = 0  # the largest of all ranks' signals at the last call
        numbers = SIGNALS if threading.current_thread() is threading.main_thread() else ()
        self._previous = {number: signal.signal(number, self._remember) for number in numbers}

    def __call__(self) -> bool:
        """Return whether any rank has a signal to stop."""
        # A signal that comes while the ranks talk stays in `_received`, for the next question.
        self._agreed = int(self._ranks.max(torch.tensor(self._received)))
        return self._agreed != 0

    @property
    def exit_code(self) -> int:
        """Exit code that a shell expects: 128 plus the signal's number; 0 without a signal."""
        return 128 + self._agreed if self._agreed else 0

    def restore(self) -> None:
        """Put the handlers back that were there before.

        A signal that came after the last question goes to the handler that a program around the run has set for it.
        """
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        own = self._previous.get(signal.Signals(self._received)) if self._received and not self._agreed else None
        if callable(own) and own is not signal.default_int_handler:
            own(self._received, None)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self._received and number == signal.SIGINT:
            if os.environ.get("RANK", "0") == "0":
                os.write(2, INTERRUPTED)  # past sys.stderr, which this thread may be writing to
            raise KeyboardInterrupt
        if not self._received:
            # The signal may have come while this thread writes a line; another one waits for its end.
            threading.Thread(target=_answer, args=(number,), name="answer to a signal", daemon=True).start()
        self._received = number


def _answer(number: int) -> None:
    """Say on rank 0 what the signal leads to; the other ranks' information is not shown."""
    steps = next((phase for phase in progress.active() if phase.rounds), None)
    doing = "the first step" if steps is None else f"step {steps.done + 1:.0f}"
    again = "; Ctrl-C again stops at once" if number == signal.SIGINT else ""
    log.info("%s: finishing %s, then saving%s", signal.Signals(number).name, doing, again)
