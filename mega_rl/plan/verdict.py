"""Verdicts: whether every rank's memory holds what every phase needs, and which one it is that does not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mega_rl.plan.phases import MemoryPhase, RankMemory, memory_of_stages
from mega_rl.plan.setup import RunSetup


@dataclass(frozen=True)
class FitVerdict:
    """The phase and rank that need most, against the memory of a device."""

    fits: bool | None  # None: the memory of a device is not known
    memory: RankMemory
    phase: MemoryPhase
    limit: int | None

    @property
    def sentence(self) -> str:
        """Return the verdict in words."""
        needs = (
            f"rank {self.memory.rank} needs {in_gb(self.phase.needed)} while {self.phase.name} ({_largest(self.phase)})"
        )
        if self.limit is None:
            return f"{needs}; the memory of a GPU is not known here: give it as --gpu-memory 80G"
        if self.fits:
            return f"it fits: {needs}, of {in_gb(self.limit)}"
        return f"it does not fit: {needs}, and a GPU has {in_gb(self.limit)}"


def judge(setup: RunSetup, memory: Iterable[RankMemory] | None = None) -> FitVerdict:
    """Return the verdict on a run; `memory`: of its stages, where it is there already."""
    stages = memory_of_stages(setup, ends=True) if memory is None else memory
    fullest = max(stages, key=lambda each: each.peak.needed)
    limit = setup.machine.gpu_memory
    fits = None if limit is None else fullest.peak.needed <= limit
    return FitVerdict(fits, fullest, fullest.peak, limit)


def in_gb(nbytes: float) -> str:
    """Return bytes in gigabytes of 10^9, as "79.3 GB"."""
    return f"{nbytes / 1e9:,.1f} GB"


def _largest(phase: MemoryPhase) -> str:
    """Return the three largest uses of a phase in words."""
    entries = sorted(phase.entries.items(), key=lambda entry: -entry[1])[:3]
    return ", ".join(f"{name} {size / 1e9:,.1f}" for name, size in entries if size)
