"""Cause of a run's end, from the ends of its ranks: pure functions of what a launcher has seen."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from mega_rl.errors import RunError, UserError, name_of_signal
from mega_rl.health.endings import UNSAID
from mega_rl.launcher.ranks import INNOCENT, LOST_PEER, RankEnd
from mega_rl.launcher.signals import STOPPED


@dataclass(frozen=True)
class Conclusion:
    """End of a launch: its exit code, and the line that says why, empty where all is said or well."""

    code: int
    line: str = ""


@dataclass(frozen=True)
class RunFailure:
    """Cause of a run's failure in one line; `said`: the rank has said it on standard error, in its own words.

    code: exit code of the run. rank: None where no rank is to blame. node: number of the launcher to blame, if any.
    """

    cause: str
    code: int
    rank: int | None = None
    said: bool = False

    @property
    def may_go_on(self) -> bool:
        """Return whether the run may be tried again: not after a mistake of the user's, nor when it was stopped."""
        return self.code not in (UserError.exit_code, *STOPPED)


def first_failure(ends: Sequence[RankEnd]) -> RankEnd | None:
    """Return the rank's end that explains the others, given in their order; None when none has failed.

    A mistake of the user's comes first, an innocent rank last.
    """
    failures = [end for end in ends if end.code]
    mistakes = [end for end in failures if end.code == UserError.exit_code]
    own = [end for end in failures if end.code not in INNOCENT]
    return next(iter((*mistakes, *own, *failures)), None)


def failure_of(ends: Sequence[RankEnd], *, world_size: int) -> RunFailure | None:
    """Return why a run has failed, None when none of its ranks has. ends: in their order."""
    first = first_failure(ends)
    if first is None:
        return None
    who = f"rank {first.rank} (process {first.pid})"
    if first.code in INNOCENT:
        missing = sorted({*range(world_size)} - {end.rank for end in ends})
        others = f"rank {_in_words(missing)}" if missing else "another rank"
        what = "lost the connection to" if first.code == LOST_PEER else "waited trainer.timeout_s in a collective for"
        tail = ", which had not ended" if missing else ", which says no more"
        return RunFailure(f"{who} {what} {others}{tail}", RunError.exit_code)
    said = 0 < first.code < UNSAID
    return RunFailure(f"{who} {ending(first.code)}", _exit_code(first), rank=first.rank, said=said)


def ending(exit_code: int) -> str:
    """Return how a rank ended, from the code of its end; see `RankEnd`."""
    if exit_code >= UNSAID:
        return f"ended with exit code {exit_code - UNSAID} before its work was done"
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    name = name_of_signal(-exit_code)
    return f"was killed by {name}" + (": perhaps the machine is out of memory" if name == "SIGKILL" else "")


def stop_code(ends: Sequence[RankEnd], number: int) -> int:
    """Return the exit code of a run that was stopped by a signal: its own, unless a rank failed in another way.

    A run that had come to its end has ended well.
    """
    codes = [_exit_code(end) for end in ends]
    others = [code for code in codes if code not in (0, 128 + number, 128 + signal.SIGKILL, *STOPPED, *INNOCENT)]
    return 0 if ends and not any(codes) else next(iter(others), 128 + number)


def _exit_code(end: RankEnd) -> int:
    """Return the exit code of a run that ends as this rank has."""
    return RunError.exit_code if end.code >= UNSAID else end.code if end.code >= 0 else 128 - end.code


def _in_words(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
