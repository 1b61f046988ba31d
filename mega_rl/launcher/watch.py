"""Watch over one generation of a run's ranks: what has ended, and what is due for the others. No processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import Enum

from mega_rl.errors import RunError, UserError
from mega_rl.launcher.outcome import RunFailure, failure_of
from mega_rl.launcher.ranks import INNOCENT, WAITED_IN_VAIN, RankEnd
from mega_rl.launcher.signals import SIGNALS, STOPPED
from mega_rl.launcher.warden import SAVE_S

SETTLE_S = 0.5  # after a first failure: others that end in it may explain it
# After a rank that only lost another: that one may still be closing its files, or letting rank 0 speak first.
INNOCENT_S = 10.0
LATE_S = 2.0  # after a rank whose collective took too long: the others of the collective give up as well
KILL_S = 60.0  # after the order to end, which nodes enforce by themselves, some time after they have written stacks
GIVE_UP_S = 60.0  # after the kill: a process that the kernel does not end, say in a file system that does not answer


class Due(Enum):
    """Order for the ranks that have not ended."""

    NOTHING = ""
    END = "end"  # of a failed run
    KILL = "kill"


class GenerationWatch:
    """Ends of the ranks of one generation, in their order."""

    def __init__(self, world_size: int, clock: Callable[[], float]) -> None:
        self._world_size, self._clock = world_size, clock
        self._ends: list[RankEnd] = []
        self._gone: set[int] = set()  # ranks that have ended, or whose node is lost
        self._counted: int | None = None  # ends before the order to end: later ones are its effect
        self._failure: RunFailure | None = None  # that no rank's end tells
        self._end_at = self._kill_at = self._give_up_at = math.inf
        self._is_stopped = False

    @property
    def ends(self) -> Sequence[RankEnd]:
        """Return the ends that were not ordered."""
        return self._ends[: self._counted]

    @property
    def over(self) -> bool:
        """Return whether every rank has ended, or will not though it was killed."""
        return len(self._gone) == self._world_size or self._clock() >= self._give_up_at

    @property
    def left(self) -> Sequence[int]:
        """Return the ranks that have not ended."""
        return sorted({*range(self._world_size)} - self._gone)

    @property
    def running(self) -> bool:
        """Return whether nothing has happened yet that ends the run."""
        return self._end_at == self._kill_at == math.inf

    @property
    def failure(self) -> RunFailure | None:
        """Return why the run has failed, None if it has not."""
        return self._failure or failure_of(self.ends, world_size=self._world_size)

    def add(self, end: RankEnd) -> None:
        """Note a rank's end."""
        self._ends.append(end)
        self._gone.add(end.rank)
        if end.code in STOPPED:  # all ranks stop after the same step, also when one alone got the signal
            self.stop()
        elif end.code:
            # Ranks that were stopped while they started die of the signal, and others then of their absence.
            innocent = (0, *INNOCENT, *((-number for number in SIGNALS) if self._is_stopped else ()))
            only_innocent = all(one.code in innocent for one in self._ends)
            only_late = all(one.code == WAITED_IN_VAIN for one in self._ends)
            settle_s = LATE_S if only_late else INNOCENT_S if only_innocent else SETTLE_S
            self._end_within(0.0 if end.code == UserError.exit_code else settle_s)

    def lose(self, ranks: Sequence[int], cause: str) -> None:
        """Note that the launcher of these ranks is gone."""
        if len(self._gone.union(ranks)) > len(self._gone):
            self._gone.update(ranks)
            self.fail(cause)

    def fail(self, cause: str) -> None:
        """Note a failure that is not the end of a rank."""
        if self._counted is None and self._failure is None and self.failure is None:
            self._failure = RunFailure(cause, RunError.exit_code)
        self._end_within(0.0)

    def stop(self) -> None:
        """Note that ranks were asked to end their step and save: they have SAVE_S seconds."""
        self._is_stopped = True
        self._kill_at = min(self._kill_at, self._clock() + SAVE_S)

    def due(self) -> Due:
        """Return the order that is due now, each once."""
        now = self._clock()
        due = Due.KILL if now >= self._kill_at else Due.END if now >= self._end_at else Due.NOTHING
        if due is not Due.NOTHING and self._counted is None:
            self._counted = len(self._ends)
        if due is Due.KILL:
            self._kill_at, self._give_up_at = math.inf, now + GIVE_UP_S
        elif due is Due.END:
            self._end_at, self._kill_at = math.inf, now + KILL_S
        return due

    def _end_within(self, seconds: float) -> None:
        if self._counted is None:
            self._end_at = min(self._end_at, self._clock() + seconds)
