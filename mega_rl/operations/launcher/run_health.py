"""Read the health of a run's ranks from its folder, and its progress.

Files are read in threads, so that a file system that hangs does not block the launcher's signals.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import TypeAlias, TypeVar

from mega_rl.operations.diagnosis import diagnose, kills_for_memory
from mega_rl.operations.launcher.ranks import INNOCENT, RankEnd
from mega_rl.operations.observations import collect, in_words
from mega_rl.processes import Running
from mega_rl.tracking.health.records import RankRecord, clear, health_folder, read_records

log = logging.getLogger(__name__)

Value = TypeVar("Value")
# Returns the names of a run's newest complete checkpoints on disk and in this host's memory, each with the time of its
# folder, "step_000012@1732600000"; "" for none.
NewestCheckpoints: TypeAlias = Callable[[Path], tuple[str, str]]

ANSWER_S = 60.0  # for a few small files, from a busy file server
LOOK_S = 0.5  # one look for overdue waits, before the launcher turns to its other work
LEAST_MARGIN_S = 5.0  # after a deadline, in which its owner ends by itself
SILENT_S = 60.0  # silence of all ranks that ends them, in addition to trainer.timeout_s


class RunHealth:
    """Health of the ranks of a run, as they record it in the run's folder.

    A folder that does not answer tells nothing; silent ranks make the run overdue. Wall clocks jump, so silence is
    measured by this process's monotonic clock.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._kills = kills_for_memory()
        self._look: Running[str | None] | None = None
        self._look_began = 0.0
        self._beats: dict[int, float] = {}  # last beat of each rank
        self._heard = 0.0  # time of the last new beat
        self._timeout_s = 0.0  # the longest of any rank

    def clear(self) -> None:
        """Remove records, stacks and claims, but not reports; on node 0."""
        self._within(lambda: clear(self._run_dir), None)

    def step(self) -> int | None:
        """Return the most steps that a rank has recorded, None without any; on node 0."""
        steps = [record.step for record in self._records().values() if record.step is not None]
        return max(steps, default=None)

    def overdue(self) -> str | None:
        """Return why ranks count as stuck though none has ended, or None; on node 0."""
        if self._look is None:
            self._look, self._look_began = Running(self.look, name="look for overdue waits"), monotonic()
        if self._look.wait(LOOK_S):
            seconds = monotonic() - self._look_began
            if seconds <= SILENT_S + self._timeout_s:
                return None
            return f"the run folder {self._run_dir} has not answered for {seconds:.0f} s: its file system hangs"
        look, self._look = self._look, None
        return look.outcome()

    def look(self) -> str | None:
        """Return why ranks count as stuck from one reading of their records, or None."""
        records = read_records(self._run_dir)
        beats = {rank: record.beat for rank, record in records.items()}
        if beats != self._beats:
            self._beats, self._heard = beats, monotonic()
        self._timeout_s = max((self._timeout_s, *(record.timeout_s for record in records.values())))
        living = {rank: record for rank, record in records.items() if record.ended is None}
        if not living or len(living) < len(records):
            return None  # no rank has begun; or one has ended, and its launcher knows
        silent_s = monotonic() - self._heard
        if silent_s > SILENT_S + self._timeout_s:
            return f"no sign of life of {in_words(list(living))} for {silent_s:.0f} s"
        reasons = (f"rank {rank} {reason}" for rank, record in living.items() if (reason := _past_deadline(record)))
        return next(reasons, None)

    def collect(self, processes: Mapping[int, int]) -> None:
        """Write the stacks of this node's ranks, in about ten seconds. processes: pid by rank."""
        if processes:
            self._within(lambda: collect(self._run_dir, processes), None)

    def diagnose(self, ends: Sequence[RankEnd], *, world_size: int) -> str | None:
        """Return the cause of a failure in one line with its report; on node 0.

        Empty if a rank has reported it on standard error, None if the records do not tell it.
        """
        # Innocent ranks explain themselves in their records, with the collective.
        exits = {end.rank: end.code for end in ends if end.code not in INNOCENT}
        cause = self._within(
            lambda: diagnose(self._run_dir, exits=exits, world_size=world_size, host_kills=self._kills), None
        )
        if cause is None:
            words = [record.ended for record in self._records().values()]
            return "" if any(ended is not None and ended.kind == "error" for ended in words) else None
        return cause

    def _records(self) -> dict[int, RankRecord]:
        return self._within(lambda: read_records(self._run_dir), {})

    def _within(self, call: Callable[[], Value], otherwise: Value) -> Value:
        """Return a call's result, or `otherwise` with a warning if it takes too long."""
        folder = health_folder(self._run_dir)
        running = Running(call, name=f"access to {folder}")
        if running.wait(ANSWER_S):
            log.warning("access to %s takes longer than %g s: does the file system hang?", folder, ANSWER_S)
            return otherwise
        return running.outcome()


def _past_deadline(record: RankRecord) -> str | None:
    waiting = record.waiting
    margin_s = max(LEAST_MARGIN_S, 3 * record.interval_s)
    if waiting is not None and waiting.age_s > (waiting.deadline_s or record.timeout_s) + margin_s:
        return f"waits in {waiting} for {waiting.age_s:.0f} s, longer than it may"
    for phase in record.phases:
        if phase.deadline_s is not None and phase.seconds > 1.5 * phase.deadline_s + 60.0:
            return f"is in {phase.name!r} for {phase.seconds:.0f} s, longer than it may"
    return None


class RunProgress:
    """Steps that are done and saved, as a launcher can see them."""

    def __init__(self, run_dir: Path, health: RunHealth, newest: NewestCheckpoints, *, resume: str = "auto") -> None:
        """resume: the run's checkpoint.resume."""
        self._health, self._resume = health, resume
        self._newest = lambda: newest(run_dir)
        self._earlier = self._newest()
        self._first = max(map(_step, self._earlier)) if resume == "auto" else _step(Path(resume).name)

    @property
    def is_saved(self) -> bool:
        """Return whether this launch has saved a checkpoint that still exists."""
        return any(one not in ("", earlier) for one, earlier in zip(self._newest(), self._earlier, strict=True))

    @property
    def step(self) -> int:
        """Return the steps done: those that ranks recorded, else those of the newest checkpoint."""
        recorded = self._health.step()
        return recorded if recorded is not None else max(0, *map(_step, self._newest()))

    @property
    def is_made(self) -> bool:
        """Return whether this launch has done a step, as far as known."""
        return self.is_saved or (self._health.step() or 0) > max(0, self._first)

    @property
    def next_start(self) -> str:
        """Return in words where restarted ranks resume, as far as this host can see."""
        if not self.is_saved and self._resume != "auto":
            return "the beginning" if self._resume == "never" else f"checkpoint.resume={self._resume}"
        on_disk, in_memory = map(_step, self._newest())
        if in_memory > on_disk:
            return f"the checkpoint of step {in_memory} in memory"
        return f"the checkpoint of step {on_disk} on disk" if on_disk >= 0 else "the beginning"


def _step(checkpoint: str) -> int:
    """Return the step in a checkpoint's name; -1 without one."""
    name = re.match(r"step_(\d+)", checkpoint)
    return int(name[1]) if name else -1
