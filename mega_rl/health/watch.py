"""Watch on a run from outside: whether it stands still although no rank has ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from mega_rl.health.evidence import in_words
from mega_rl.health.records import RankRecord, read_records

LEAST_MARGIN_S = 5.0  # after a deadline, within which whoever has it ends by himself
SILENT_S = 60.0  # beyond trainer.timeout_s, of all ranks


@dataclass
class RunWatch:
    """Watch on the records of a run. Silence is measured by this process's monotonic clock: wall clocks jump."""

    run_dir: Path
    clock: Callable[[], float] = time.monotonic
    _beats: dict[int, float] = field(default_factory=dict, init=False)  # of each rank, at the last look
    _heard: float = field(default=0.0, init=False)  # when one of them was new
    _timeout_s: float = field(default=0.0, init=False)  # the longest of any rank

    @property
    def patience_s(self) -> float:
        """Return how long a run may be silent: beyond what a collective may take."""
        return SILENT_S + self._timeout_s

    def overdue(self) -> str | None:
        """Return in words that a run hangs without a rank that ends by itself, None while there is hope.

        All ranks are silent for longer than a collective may take, or a wait or phase is past its deadline and a
        margin.
        """
        records = read_records(self.run_dir)
        beats = {rank: record.beat for rank, record in records.items()}
        if beats != self._beats:
            self._beats, self._heard = beats, self.clock()
        self._timeout_s = max((self._timeout_s, *(record.timeout_s for record in records.values())))
        living = {rank: record for rank, record in records.items() if record.ended is None}
        if not living or len(living) < len(records):
            return None  # none has begun; or one has ended, and its launcher knows
        silent_s = self.clock() - self._heard
        if silent_s > self.patience_s:
            return f"no sign of life of {in_words(list(living))} for {silent_s:.0f} s"
        for rank, record in living.items():
            reason = _past_deadline(record)
            if reason is not None:
                return f"rank {rank} {reason}"
        return None


def _past_deadline(record: RankRecord) -> str | None:
    waiting = record.waiting
    margin_s = max(LEAST_MARGIN_S, 3 * record.interval_s)
    if waiting is not None and waiting.age_s > (waiting.deadline_s or record.timeout_s) + margin_s:
        return f"waits in {waiting} for {waiting.age_s:.0f} s, longer than it may"
    for phase in record.phases:
        if phase.deadline_s is not None and phase.seconds > 1.5 * phase.deadline_s + 60.0:
            return f"is in {phase.name!r} for {phase.seconds:.0f} s, longer than it may"
    return None
