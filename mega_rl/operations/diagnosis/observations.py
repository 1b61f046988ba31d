"""Observations of a run's ranks: records, exit codes, process states, stacks, and who waits for whom."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mega_rl.operations.diagnosis.stacks import Stacks, read_stacks
from mega_rl.tracking.health.failure_kinds import INNOCENT_CODES
from mega_rl.tracking.health.records import STOPPED, Collective, RankRecord, load_record, read_records


@dataclass(frozen=True)
class Observations:
    """State of a run's ranks at one moment."""

    world_size: int
    now: float  # time.time()
    records: Mapping[int, RankRecord]
    states: Mapping[int, str] = field(default_factory=dict)  # letters, of ranks on this host or with stacks; "": gone
    exits: Mapping[int, int] = field(default_factory=dict)  # in the order of the ends; below 0 a signal
    stacks: Mapping[int, Stacks] = field(default_factory=dict)

    def waiting(self, rank: int) -> Collective | None:
        """Return the collective that a rank waits in, or waited in when it failed."""
        record = self.records.get(rank)
        if record is None:
            return None
        if record.ended is not None:
            return record.ended.waiting if record.ended.kind in INNOCENT_CODES else None
        return record.waiting

    def is_innocent(self, rank: int) -> bool:
        """Return whether a rank ended because of another rank."""
        record = self.records.get(rank)
        if record is None:
            return False
        if record.ended is not None:
            return record.ended.kind in INNOCENT_CODES
        # The watchdog of NCCL aborts the process of a rank whose collective is overdue.
        waiting = record.waiting
        near = waiting is not None and waiting.age_s >= 0.5 * (waiting.deadline_s or record.timeout_s)
        return self.exits.get(rank) == -6 and near

    def has_ended(self, rank: int) -> bool:
        """Return whether a rank's process is known to have ended."""
        record = self.records.get(rank)
        said = record is not None and record.ended is not None
        return rank in self.exits or said or self.states.get(rank) == ""

    def may_live(self, rank: int) -> bool:
        """Return whether a rank may still run: its process lives, or its beats come in time."""
        record = self.records[rank]
        return not self.has_ended(rank) and (rank in self.states or not record.silent_s(self.now))

    def missing(self) -> list[int]:
        """Return stopped ranks, and ranks that others wait for but that wait in no collective."""
        waiting = {rank: one for rank in self.records if (one := self.waiting(rank)) is not None}
        frozen = {rank for rank, state in self.states.items() if state in STOPPED}
        awaited: set[int] = set()
        for rank, one in waiting.items():
            if rank in frozen:
                continue
            members = one.ranks or tuple(range(self.world_size))
            awaited |= {other for other in members if not same_call(one, waiting.get(other))}
        if not waiting:  # they wait in something unrecorded, such as pipeline messages over gloo
            awaited = {rank for rank in range(self.world_size) if not self.is_innocent(rank)}
        return sorted(rank for rank in awaited | frozen if rank in frozen or rank not in waiting)


def observe(run_dir: Path, *, world_size: int | None = None, exits: Mapping[int, int] | None = None) -> Observations:
    """Return the observations in a run's folder, and those of this host on its own ranks.

    exits: from the launcher, which has killed the other ranks by now: states of ended processes mean nothing then.
    """
    records = read_records(run_dir)
    size = max((one.world_size for one in records.values()), default=0) if world_size is None else world_size
    records = {rank: record for rank, record in records.items() if rank < size}
    host = socket.gethostname()
    states, stacks = {}, {}
    for rank, record in list(records.items()):
        stack = read_stacks(run_dir, rank)
        if stack is not None:
            stacks[rank], states[rank] = stack, stack.state
        elif record.host == host:
            now = record.process_state()
            if not now:  # its last words may be newer than the record read above
                last = load_record(run_dir, rank)
                records[rank] = last if last is not None and last.pid == record.pid else record
            if exits is None or now:
                states[rank] = now
    return Observations(size, time.time(), records, states, exits or {}, stacks)


def same_call(one: Collective, other: Collective | None) -> bool:
    """Return whether two calls are the same collective."""
    if other is None:
        return False
    same_group = one.group == other.group and (one.ranks == other.ranks or not (one.ranks and other.ranks))
    return same_group and one.sequence == other.sequence and one.operation == other.operation


def by_call(seen: Observations) -> list[tuple[Collective, list[int]]]:
    """Return (collective, ranks that wait in it) pairs, the most ranks first."""
    calls: list[tuple[Collective, list[int]]] = []
    for rank in sorted(seen.records):
        waiting = seen.waiting(rank)
        if waiting is None:
            continue
        match = next((ranks for call, ranks in calls if same_call(call, waiting)), None)
        if match is None:
            calls.append((waiting, [rank]))
        else:
            match.append(rank)
    return sorted(calls, key=lambda call: -len(call[1]))


def in_words(ranks: Sequence[int], *, most: int = 8) -> str:
    """Return "rank 3", "ranks 0 and 1", or "ranks 0, 1, 2, ... (64 in all)"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > most:
        return f"ranks {', '.join(map(str, ranks[:3]))}, ... ({len(ranks)} in all)"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
