"""Records of ranks as tests need them."""

from __future__ import annotations

from typing import Any

from mega_rl.operations.observations import Observations
from mega_rl.tracking.health.records import Collective, LastWords, PhaseRecord, Place, RankRecord

NOW = 1_000_000.0
STOPPED, RUNNING = "T", "R"


def record(rank: int = 0, **changes: Any) -> RankRecord:
    """A rank of four, at work in the third step."""
    fields: dict[str, Any] = {
        "rank": rank,
        "world_size": 4,
        "generation": 0,
        "pid": 100 + rank,
        "started": 1,
        "host": "node7",
        "beat": NOW,
        "interval_s": 5.0,
        "timeout_s": 600.0,
        "step": 2,
        "phases": (PhaseRecord("update actor", 30.0),),
        "place": Place("forward", "/lib/layers.py", 12),
    }
    return RankRecord(**fields | changes)


def call(
    group: str, sequence: int | None, *ranks: int, operation: str = "all_reduce", age_s: float = 40.0
) -> Collective:
    return Collective(operation, group, ranks, sequence, age_s, 600.0)


def late(rank: int, waiting: Collective | None, kind: str = "timeout") -> RankRecord:
    """A rank that has given up."""
    return record(rank, ended=LastWords(kind, "gloo: Timed out", 2, "update actor", waiting))


def seen(*records: RankRecord, **changes: Any) -> Observations:
    return Observations(4, NOW, {one.rank: one for one in records}, **changes)
