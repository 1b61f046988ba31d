"""Cause of a run's failure: the rank that lags or died, the collective or phase that misses it, the likely reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mega_rl.errors import name_of_signal
from mega_rl.health.endings import UNSAID
from mega_rl.health.evidence import INNOCENT, Evidence, by_call, gather, in_phase, in_words, same_call
from mega_rl.health.processes import STATES, kills_for_memory, memory_limit, memory_of_host
from mega_rl.health.records import RankRecord
from mega_rl.health.report import write_report

SIGKILL, SIGTERM = 9, 15
USUAL = (0, 2)  # exit codes of ranks that said themselves why, if they failed
STOPPED_CODES = tuple(128 + number for number in (2, 10, 15))  # as ranks end that were asked to stop
SHORT_OF_MEMORY = 0.05  # share of the memory that is free


@dataclass(frozen=True)
class Diagnosis:
    """Likely cause of a failure."""

    cause: str  # one line: rank, collective or phase, reason
    rank: int | None = None  # that lags or died
    report: Path | None = None


def diagnose(
    run_dir: Path, *, exits: Mapping[int, int] | None, world_size: int, write: bool = True, host_kills: int = 0
) -> Diagnosis | None:
    """Return why a run failed or stands still, None where the ranks said so themselves or have no records.

    exits: exit codes by rank, in the order of the ends, below 0 a signal; of the ranks that ended before a launcher
    began to end the others, None without a launcher. write: a hang or death gets a report in
    RUN_DIR/health. host_kills: `processes.kills_for_memory` as the run began, of which more mean that memory ran out.
    """
    evidence = gather(run_dir, world_size=world_size, exits=exits)
    named = name_cause(evidence, memory_ran_out=kills_for_memory() > host_kills)
    if named is None:
        return None
    cause, rank = named
    report = write_report(run_dir, evidence, cause) if write else None
    return Diagnosis(cause, rank, report)


def name_cause(evidence: Evidence, *, memory_ran_out: bool = False) -> tuple[str, int | None] | None:
    """Return (one line that names the cause, the rank that it blames); None where there is nothing to say.

    memory_ran_out: the kernel has killed a process for lack of memory since the run began.
    """
    if not evidence.records:
        return None
    return _death(evidence, memory_ran_out) or _interrupted(evidence) or _failure(evidence) or _hang(evidence)


def _death(evidence: Evidence, memory_ran_out: bool) -> tuple[str, int] | None:
    """Return the first rank that died without a word of its own, and was not ended by a launcher because of others."""
    for rank in _in_order_of_ends(evidence):
        record = evidence.records.get(rank)
        if evidence.is_innocent(rank) or (record is not None and record.ended is not None):
            continue
        number = _signal_of(evidence, rank)
        state = evidence.states.get(rank)
        if number == SIGTERM or (number == SIGKILL and state is not None and state.stopped):
            continue  # by a launcher, which ends the ranks that are left
        if number:
            memory = _of_memory(record, memory_ran_out) if number == SIGKILL else ""
            return f"{_named(evidence, rank)} was killed by {name_of_signal(number)}{_last_seen(record)}{memory}", rank
        code = evidence.exits.get(rank)
        if code is None:
            memory = _of_memory(record, memory_ran_out) if memory_ran_out else ""
            return f"{_named(evidence, rank)} has died without a word{_last_seen(record)}{memory}", rank
        if code >= UNSAID:
            users = record is not None and record.place is not None and record.place.users != ""
            seen = f", last seen {_doing(record)}" if record and users else _last_seen(record)
            return f"{_named(evidence, rank)} ended with exit code {code - UNSAID} before its work was done{seen}", rank
        if code not in (*USUAL, *STOPPED_CODES):
            return f"{_named(evidence, rank)} ended with exit code {code}{_last_seen(record)}", rank
    return None


def _interrupted(evidence: Evidence) -> tuple[str, int] | None:
    """Return the rank whose own work made no progress and was interrupted."""
    for rank, record in evidence.records.items():
        if record.ended is not None and record.ended.kind == "hung":
            return f"{_named(evidence, rank)} hung {_doing(record)}: {record.ended.message}", rank
    return None


def _failure(evidence: Evidence) -> tuple[str, int] | None:
    """Return the first rank that ended with an error of its own, unless rank 0, which is heard, had the same."""
    ended = [(rank, record.ended) for rank in _in_order_of_ends(evidence) if (record := evidence.records.get(rank))]
    failed = [(rank, words) for rank, words in ended if words is not None and words.kind == "error"]
    if not failed or any(rank == 0 for rank, _ in failed):
        return None
    rank, words = failed[0]
    return f"{_named(evidence, rank)} failed{in_phase(words.phase, words.step)}: {words.message}", rank


def _hang(evidence: Evidence) -> tuple[str, int | None] | None:
    """Return the rank that others wait for."""
    calls = by_call(evidence)
    ended_by_others = [rank for rank in evidence.records if evidence.is_innocent(rank)]
    overdue = [rank for rank in evidence.records if evidence.records[rank].silent_s(evidence.now)]
    stopped = [rank for rank, state in evidence.states.items() if state.stopped]
    if not (calls or ended_by_others or overdue or stopped):
        return None
    missing = [rank for rank in evidence.missing() if not _done(evidence, rank)] or evidence.missing()
    while_others = _while_others(evidence, missing)
    if missing:
        rank = min(missing, key=lambda one: _likelihood(evidence, one))
        also = f" (also missing: {in_words([one for one in missing if one != rank])})" if len(missing) > 1 else ""
        return f"{_named(evidence, rank)} {_state_of(evidence, rank)}{while_others}{also}", rank
    if (diverged := _divergence(evidence)) is not None:
        return diverged
    if len(calls) == 1:
        return f"all ranks wait in {calls[0][0]}: the network between them, or the device, does not answer", None
    if calls:
        groups = ", ".join(f"{in_words(ranks)} in {call}" for call, ranks in calls[:3]) + ", ..." * (len(calls) > 3)
        return f"all ranks of each group wait, {groups}: the network between them, or the device, does not answer", None
    return None


def _divergence(evidence: Evidence) -> tuple[str, int] | None:
    """Return two ranks that wait for each other in different collectives, those of the smallest group; None without.

    Groups whose ranks all wait in one call of their own have not diverged.
    """
    waiting = {rank: call for rank in sorted(evidence.records) if (call := evidence.waiting(rank)) is not None}
    everyone = tuple(range(evidence.world_size))
    pairs = [
        (len(call.ranks or everyone), rank, other)
        for rank, call in waiting.items()
        for other in call.ranks or everyone
        if other in waiting and not same_call(call, waiting[other])
    ]
    if not pairs:
        return None
    mutual = [pair for pair in pairs if pair[1] in (waiting[pair[2]].ranks or everyone)]
    _, rank, other = min(mutual or pairs)
    return f"diverged: rank {other} waits in {waiting[other]} while rank {rank} waits for it in {waiting[rank]}", other


def _likelihood(evidence: Evidence, rank: int) -> tuple[int, int]:
    """Return a sort key of ranks that are missed: stopped and dead ones first, then the silent, then those at work."""
    state, record = evidence.states.get(rank), evidence.records.get(rank)
    if state is not None and (state.stopped or not state.alive):
        return 0, rank
    if record is None or record.silent_s(evidence.now):
        return 1, rank
    return 2, rank


def _state_of(evidence: Evidence, rank: int) -> str:
    """Return what a rank that is missed does, as the predicate of a sentence."""
    record, state = evidence.records.get(rank), evidence.states.get(rank)
    if record is None:
        return "has left no record"
    where = _when(record)
    if state is not None and state.stopped:
        return f"is stopped (state {state.state}){_at(evidence, rank)}{_last_seen(record)}"
    if record.ended is not None:
        return f"has ended ({record.ended.kind}){where}"
    if state is not None and not state.alive:
        return f"is gone{where}"
    doing = _doing(record)
    silent_s = record.silent_s(evidence.now)
    if silent_s:
        seen = f", process state {state.state}: {STATES[state.state]}" if state is not None else ""
        return f"has given no sign of life for {silent_s:.0f} s{seen}{_at(evidence, rank)}; last seen {doing}"
    return f"is {doing}"


def _doing(record: RankRecord) -> str:
    place = record.place
    where = _when(record)
    if place is None:
        return f"at work{where}"
    if place.users:
        kind = "reward function" if record.phase == "reward" else "your function"
        return f"in {kind} {place.users} at {place.file}:{place.line}{where}"
    return f"in {place.function} at {place.file}:{place.line}{where}"


def _at(evidence: Evidence, rank: int) -> str:
    """Return the line that the main thread is at by its stacks, which are newer than a silent rank's record."""
    stacks = evidence.stacks.get(rank)
    return f" at {stacks.top}" if stacks is not None and stacks.top else ""


def _last_seen(record: RankRecord | None) -> str:
    where = _when(record)
    return f", last seen{where}" if where else ""


def _while_others(evidence: Evidence, missing: list[int]) -> str:
    for call, ranks in by_call(evidence):
        others = [rank for rank in ranks if rank not in missing]
        if others and any(not call.ranks or rank in call.ranks for rank in missing or others):
            verb = "waits" if len(others) == 1 else "wait"
            return f", while {in_words(others)} {verb} for it in {call}"
    return ""


def _when(record: RankRecord | None) -> str:
    if record is None:
        return ""
    if record.ended is not None:
        return in_phase(record.ended.phase, record.ended.step)
    return in_phase(record.phase, record.step)


def _named(evidence: Evidence, rank: int) -> str:
    record = evidence.records.get(rank)
    return f"rank {rank}" if record is None else f"rank {rank} (pid {record.pid}, {record.host})"


def _in_order_of_ends(evidence: Evidence) -> list[int]:
    """Return the ranks that have ended: those of known order first, then by their last beats."""
    others = [rank for rank in evidence.records if rank not in evidence.exits and evidence.has_ended(rank)]
    return [*evidence.exits, *sorted(others, key=lambda rank: evidence.records[rank].beat)]


def _signal_of(evidence: Evidence, rank: int) -> int:
    code, state = evidence.exits.get(rank, 0), evidence.states.get(rank)
    return -code if code < 0 else state.exit_signal if state is not None else 0


def _done(evidence: Evidence, rank: int) -> bool:
    record = evidence.records.get(rank)
    return record is not None and record.ended is not None and record.ended.kind not in INNOCENT


def _of_memory(record: RankRecord | None, memory_ran_out: bool) -> str:
    """Return what the kernel says about memory after a SIGKILL."""
    if memory_ran_out:
        return ": the kernel has killed a process for lack of memory"
    used, limit = memory_limit()
    available, total = memory_of_host()
    if (limit and used > (1 - SHORT_OF_MEMORY) * limit) or (total and available < SHORT_OF_MEMORY * total):
        return ": memory is nearly full, perhaps it ran out"
    resident = record.memory.get("resident", 0) if record is not None else 0
    return f": perhaps out of memory (it held {resident / 1e9:.1f} GB)"
