"""Knowledge of ranks beyond their ends: the one place where launchers ask what ranks record in their run folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from mega_rl.launcher.ranks import RankEnd


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
        """Return the cause of a failure in one line, None where records do not tell it; on node 0."""


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


def health_of(run_dir: Path | None) -> RankHealth:
    """Return the health of the ranks of a run folder; None: of a program that has none."""
    return NoRecords()
