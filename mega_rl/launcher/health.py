"""Knowledge of ranks beyond their ends: the one place where launchers ask what ranks record in their run folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from mega_rl.health.diagnosis import diagnose
from mega_rl.health.processes import kills_for_memory
from mega_rl.health.records import RankRecord, clear, health_folder, read_records
from mega_rl.health.stacks import collect
from mega_rl.health.watch import RunWatch
from mega_rl.launcher.beside import RepeatedCall, within
from mega_rl.launcher.ranks import INNOCENT, RankEnd

Value = TypeVar("Value")

ANSWER_S = 60.0  # for a few small files, from a file server that is busy
LOOK_S = 0.5  # of one look for waits that are overdue, before the launcher turns to its other work


class RankHealth(Protocol):
    """Records that ranks keep while they run, and what they tell."""

    def clear(self) -> None:
        """Remove the records of an earlier generation; on node 0."""

    def step(self) -> int | None:
        """Return the steps that are done, None where no rank has recorded any; on node 0."""

    def overdue(self) -> str | None:
        """Return the reason why ranks are taken for stuck though none has ended, or None; on node 0."""

    def collect(self, processes: Mapping[int, int]) -> None:
        """Write the stacks of this node's ranks, given by their processes, in some ten seconds at most."""

    def diagnose(self, ends: Sequence[RankEnd], *, world_size: int) -> str | None:
        """Return the cause of a failure in one line; on node 0.

        Empty where a rank has said it on standard error, None where records do not tell it.
        """


class NoRecords:
    """Health of ranks that record nothing."""

    def clear(self) -> None:
        """Remove nothing."""

    def step(self) -> int | None:
        """Return None."""
        return None

    def overdue(self) -> str | None:
        """Return None."""
        return None

    def collect(self, processes: Mapping[int, int]) -> None:
        """Write nothing."""

    def diagnose(self, ends: Sequence[RankEnd], *, world_size: int) -> str | None:
        """Return None."""
        return None


class RunRecords:
    """Health of the ranks of a run folder, as they record it (`mega_rl.health`).

    A folder that does not answer tells nothing, and makes a run whose ranks are silent with it overdue.
    """

    def __init__(self, run_dir: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._run_dir = run_dir
        self._watch = RunWatch(run_dir, clock)
        self._look = RepeatedCall(self._watch.overdue, patience_s=LOOK_S, clock=clock)
        self._kills = kills_for_memory()

    def clear(self) -> None:
        """Remove records, stacks and claims; reports stay."""
        self._within(lambda: clear(self._run_dir), None)

    def step(self) -> int | None:
        """Return the steps that the rank that has done most has recorded."""
        steps = [record.step for record in self._records().values() if record.step is not None]
        return max(steps, default=None)

    def overdue(self) -> str | None:
        """Return which wait is past its deadline, or that no rank gives a sign of life."""
        reason, seconds = self._look.make()
        if reason is None and seconds > self._watch.patience_s:
            return f"the run folder {self._run_dir} has not answered for {seconds:.0f} s: its file system hangs"
        return reason

    def collect(self, processes: Mapping[int, int]) -> None:
        """Write the stacks of this node's ranks."""
        self._within(lambda: collect(self._run_dir, processes), None)

    def diagnose(self, ends: Sequence[RankEnd], *, world_size: int) -> str | None:
        """Return the rank that lags or died, why, and the report; see `RankHealth`."""
        # The codes of ranks that say that others brought them down are in their records, with the collective.
        exits = {end.rank: end.code for end in ends if end.code not in INNOCENT}
        diagnosis = self._within(
            lambda: diagnose(self._run_dir, exits=exits, world_size=world_size, host_kills=self._kills), None
        )
        if diagnosis is None:
            words = [record.ended for record in self._records().values()]
            return "" if any(ended is not None and ended.kind == "error" for ended in words) else None
        return diagnosis.cause if diagnosis.report is None else f"{diagnosis.cause} (report: {diagnosis.report})"

    def _records(self) -> dict[int, RankRecord]:
        return self._within(lambda: read_records(self._run_dir), {})

    def _within(self, call: Callable[[], Value], otherwise: Value) -> Value:
        return within(ANSWER_S, call, otherwise=otherwise, name=f"access to {health_folder(self._run_dir)}")


def health_of(run_dir: Path | None) -> RankHealth:
    """Return the health of the ranks of a run folder; None: of a program that has none."""
    return NoRecords() if run_dir is None else RunRecords(run_dir)
