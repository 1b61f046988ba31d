"""Find the cause of a failure: which rank lags or died, where, and why."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from mega_rl.errors import UserError
from mega_rl.operations.observations import (
    Observations,
    by_call,
    collect,
    in_words,
    lines_of,
    newest_report,
    observe,
    read_stacks,
    same_call,
    write_new,
    write_report,
    write_stacks,
)
from mega_rl.tracking.health.guard import in_phase
from mega_rl.tracking.health.heartbeat import RankFacts
from mega_rl.tracking.health.records import (
    INNOCENT_CODES,
    STATES,
    STOPPED,
    UNSAID,
    RankRecord,
    ending,
    health_folder,
    read_records,
    silent_s,
)

SIGKILL, SIGTERM = 9, 15
SAID_CODES = (0, UserError.exit_code, 130, 138, 143)  # exit codes of ranks that said why they ended, or were stopped
GRACE_S = 1.5  # for ranks that wait in the same collective to record its failure


def diagnose(run_dir: Path, *, exits: Mapping[int, int] | None, world_size: int, host_kills: int = 0) -> str | None:
    """Write the report of a hang or death; return its cause and path, or None.

    exits: exit codes by rank in the order of the ends, below 0 a signal, without the ranks that the launcher ended;
    None without a launcher. host_kills: `kills_for_memory` when the run began.
    """
    seen = observe(run_dir, world_size=world_size, exits=exits)
    cause = name_cause(seen, memory_ran_out=kills_for_memory() > host_kills)
    report = None if cause is None else write_report(run_dir, seen, cause)
    return cause if report is None else f"{cause} (report: {report})"


def kills_for_memory() -> int:
    """Return how many of this host's processes the kernel has killed for lack of memory."""
    with suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def investigate(facts: RankFacts, own: str) -> str | None:
    """Return the cause of a failure that a rank noticed; None if another process finds it.

    Writes the stacks of this rank, `own`, and of this host's other ranks if no launcher does.
    """
    write_stacks(facts.run_dir, facts.rank, os.getpid(), own)
    if facts.launched:
        return None
    time.sleep(min(GRACE_S, facts.interval_s + 0.3))
    records, host = read_records(facts.run_dir), socket.gethostname()
    noticed = [rank for rank, one in records.items() if one.ended is not None and one.ended.kind in INNOCENT_CODES]
    if facts.rank == min((rank for rank in noticed if records[rank].host == host), default=facts.rank):
        collect(facts.run_dir, {rank: one.pid for rank, one in records.items() if one.host == host and not one.ended})
    if facts.rank != min(noticed, default=facts.rank):
        return None
    claim = health_folder(facts.run_dir) / f"claim_cause_{facts.generation}"  # ranks may see different records
    try:
        write_new(claim, b"")
    except OSError:
        return None
    return diagnose(facts.run_dir, exits=None, world_size=facts.world_size)


def name_cause(seen: Observations, *, memory_ran_out: bool = False) -> str | None:
    """Return a line with the cause and the rank to blame, or None.

    memory_ran_out: the kernel has killed a process for lack of memory since the run began.
    """
    if not seen.records:
        return None
    return _death(seen, memory_ran_out) or _failure(seen) or _hang(seen)


def _death(seen: Observations, memory_ran_out: bool) -> str | None:
    """Return the first rank that died without last words, except those that a launcher ended."""
    for rank in _in_order(seen):
        record, code = seen.records.get(rank), seen.exits.get(rank)
        said = (record is not None and record.ended is not None) or code in SAID_CODES
        if said or seen.is_innocent(rank) or not seen.has_ended(rank):
            continue
        if code == -SIGTERM or (code == -SIGKILL and seen.states.get(rank) in STOPPED):
            continue  # the launcher ends other ranks like this
        who, last = _named(seen, rank), _last_seen(record)
        if code == -SIGKILL and memory_ran_out:
            last += ": the kernel has killed a process for lack of memory"
        elif code == -SIGKILL:
            resident = 0 if record is None else record.memory.get("resident", 0)
            last += f": perhaps out of memory (it held {resident / 1e9:.1f} GB)"
        elif code is not None and code >= UNSAID and record is not None and record.place and record.place.users:
            last = f", last seen {_doing(record)}"
        return f"{who} {'has died without a word' if code is None else ending(code)}{last}"
    return None


def _failure(seen: Observations) -> str | None:
    """Return the rank that hung and was interrupted, or the first rank that failed by itself.

    None if rank 0 had an error: it says so itself.
    """
    ended = [(rank, record.ended) for rank in _in_order(seen) if (record := seen.records.get(rank)) and record.ended]
    for rank, words in ended:
        if words.kind == "hung":
            return f"{_named(seen, rank)} hung {_doing(seen.records[rank])}: {words.message}"
    failed = [(rank, words) for rank, words in ended if words.kind == "error"]
    if not failed or any(rank == 0 for rank, _ in failed):
        return None
    rank, words = failed[0]
    return f"{_named(seen, rank)} failed{in_phase(words.phase, words.step)}: {words.message}"


def _in_order(seen: Observations) -> list[int]:
    """Return the ranks in the order of their ends, then of their last beats."""
    others = [rank for rank in seen.records if rank not in seen.exits]
    return [*seen.exits, *sorted(others, key=lambda rank: seen.records[rank].beat)]


def _hang(seen: Observations) -> str | None:
    """Return the rank that others wait for."""
    calls = by_call(seen)
    gave_up = any(seen.is_innocent(rank) for rank in seen.records)
    silent = any(silent_s(record, seen.now) for record in seen.records.values())
    if not (calls or gave_up or silent or any(state in STOPPED for state in seen.states.values())):
        return None
    missing = seen.missing()
    missing = [rank for rank in missing if not _done(seen, rank)] or missing
    if missing:
        rank = min(missing, key=lambda one: _likelihood(seen, one))
        also = f" (also missing: {in_words([one for one in missing if one != rank])})" if len(missing) > 1 else ""
        return f"{_named(seen, rank)} {_state_of(seen, rank)}{_while_others(seen, missing)}{also}"
    if (diverged := _divergence(seen)) is not None:
        return diverged
    if not calls:
        return None
    reason = "the network between them, or the device, does not answer"
    if len(calls) == 1:
        return f"all ranks wait in {calls[0][0]}: {reason}"
    groups = ", ".join(f"{in_words(ranks)} in {call}" for call, ranks in calls[:3]) + ", ..." * (len(calls) > 3)
    return f"all ranks of each group wait, {groups}: {reason}"


def _divergence(seen: Observations) -> str | None:
    """Return two ranks of the smallest group that wait for each other in different collectives."""
    waiting = {rank: call for rank in sorted(seen.records) if (call := seen.waiting(rank)) is not None}
    world = tuple(range(seen.world_size))
    pairs = [
        (len(call.ranks or world), rank, other)
        for rank, call in waiting.items()
        for other in call.ranks or world
        if other in waiting and not same_call(call, waiting[other])
    ]
    if not pairs:
        return None
    mutual = [pair for pair in pairs if pair[1] in (waiting[pair[2]].ranks or world)]
    _, rank, other = min(mutual or pairs)
    return f"diverged: rank {other} waits in {waiting[other]} while rank {rank} waits for it in {waiting[rank]}"


def _likelihood(seen: Observations, rank: int) -> tuple[int, int]:
    """Return a sort key: stopped and dead ranks first, then silent ones, then others."""
    state, record = seen.states.get(rank), seen.records.get(rank)
    if state in ("", *STOPPED):
        return 0, rank
    return 1 if record is None or silent_s(record, seen.now) else 2, rank


def _state_of(seen: Observations, rank: int) -> str:
    """Return the state of a missing rank, as the predicate of a sentence."""
    record, state, stacks = seen.records.get(rank), seen.states.get(rank), seen.stacks.get(rank)
    if record is None:
        return "has left no record"
    at = f" at {stacks.top}" if stacks is not None and stacks.top else ""  # newer than a silent rank's record
    if state in STOPPED:
        return f"is stopped (state {state}){at}{_last_seen(record)}"
    if record.ended is not None:
        return f"has ended ({record.ended.kind}){_when(record)}"
    if state == "":
        return f"is gone{_when(record)}"
    if not (silent := silent_s(record, seen.now)):
        return f"is {_doing(record)}"
    kernel = f", process state {state}: {STATES.get(state)}" if state else ""
    return f"has given no sign of life for {silent:.0f} s{kernel}{at}; last seen {_doing(record)}"


def _doing(record: RankRecord) -> str:
    place = record.place
    if place is None:
        return f"at work{_when(record)}"
    kind = "reward function" if record.phase == "reward" else "your function"
    what = f"{kind} {place.users}" if place.users else place.function
    return f"in {what} at {place.file}:{place.line}{_when(record)}"


def _while_others(seen: Observations, missing: list[int]) -> str:
    for call, ranks in by_call(seen):
        others = [rank for rank in ranks if rank not in missing]
        if others and any(not call.ranks or rank in call.ranks for rank in missing):
            verb = "waits" if len(others) == 1 else "wait"
            return f", while {in_words(others)} {verb} for it in {call}"
    return ""


def _last_seen(record: RankRecord | None) -> str:
    where = "" if record is None else _when(record)
    return f", last seen{where}" if where else ""


def _when(record: RankRecord) -> str:
    last = record if record.ended is None else record.ended
    return in_phase(last.phase, last.step)


def _named(seen: Observations, rank: int) -> str:
    record = seen.records.get(rank)
    return f"rank {rank}" if record is None else f"rank {rank} (pid {record.pid}, {record.host})"


def _done(seen: Observations, rank: int) -> bool:
    record = seen.records.get(rank)
    return record is not None and record.ended is not None and record.ended.kind not in INNOCENT_CODES


def overview(run_dir: Path, *, stacks: bool = False) -> tuple[list[str], int]:
    """Return (lines, exit code): 1 after a hang or failure, else 0."""
    report, host, seen = newest_report(run_dir), socket.gethostname(), observe(run_dir)
    if not seen.records and report is None:
        raise UserError(
            f"--run={run_dir}: {health_folder(run_dir)} holds no records of ranks; give the trainer.run_dir of a run "
            "that has begun"
        )
    now = {rank: one.process_state for rank, one in seen.records.items() if one.host == host}
    seen = replace(seen, states=now, stacks={})
    silent = {rank for rank, one in seen.records.items() if rank not in now and silent_s(one, seen.now)}
    living = [rank for rank in seen.records if not seen.has_ended(rank) and rank not in silent]
    if living:
        if stacks:
            collect(run_dir, {rank: seen.records[rank].pid for rank in living if rank in now})
            read = {rank: one for rank in living if (one := read_stacks(run_dir, rank)) is not None}
            seen = replace(seen, stacks=read)
        return [*lines_of(seen)], 0
    ends = {None if one.ended is None else one.ended.kind for one in seen.records.values()}
    if ends and ends <= {"done", "stopped"}:
        return [*lines_of(seen), "", _end_of(seen.records[min(seen.records)])], 0
    if report is not None:
        return [f"{report[0]}:", *report[1].rstrip("\n").splitlines()], 1
    return [*lines_of(seen), "", name_cause(seen) or _end_of(seen.records[min(seen.records)])], 1


def _end_of(record: RankRecord) -> str:
    if record.ended is None:
        return "the run has ended without a word"
    after = "before its first step" if record.ended.step is None else f"after step {record.ended.step}"
    return f"ended: {record.ended.kind}, {after} {record.ended.message}".rstrip()
