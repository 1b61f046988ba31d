"""Write and find the report of a hang or death, RUN_DIR/health/report_TIME.txt; its last line is the cause."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from mega_rl.errors import UserError, in_units
from mega_rl.operations.diagnosis.observations import Observations, by_call, in_words
from mega_rl.tracking.health.failure_kinds import UNSAID
from mega_rl.tracking.health.records import STATES, RankRecord, health_folder
from mega_rl.untrusted import read_file

MAX_BYTES = 4 << 20
NAME = re.compile(r"report_\d{8}_\d{6}_\d{6}\.txt")


def write_report(run_dir: Path, seen: Observations, cause: str) -> Path | None:
    """Write a report and return its path; None if the file system refuses."""
    text = "\n".join([*lines_of(seen), "", cause, ""])
    path = health_folder(run_dir) / datetime.now().strftime("report_%Y%m%d_%H%M%S_%f.txt")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        with open(descriptor, "wb") as file:
            file.write(text.encode(errors="replace")[-MAX_BYTES:])
    except OSError:
        return None
    return path


def newest_report(run_dir: Path) -> tuple[Path, str] | None:
    """Return (path, text) of the last readable report of a run; None without one."""
    try:
        with os.scandir(health_folder(run_dir)) as scan:
            names = [entry.name for entry in scan if NAME.fullmatch(entry.name)]
    except OSError:
        return None
    for name in sorted(names, reverse=True):
        path = health_folder(run_dir) / name
        with suppress(UserError):
            text = read_file(path, MAX_BYTES).decode(errors="replace")
            return path, "".join(c if c.isprintable() or c == "\n" else " " for c in text)
    return None


def lines_of(seen: Observations) -> Iterator[str]:
    """Yield the lines of a report: collectives, ranks, stacks."""
    yield time.strftime("Report of %Y-%m-%d %H:%M:%S", time.localtime(seen.now))
    yield f"{seen.world_size} ranks, {len(seen.records)} with a record"
    yield ""
    yield "Collectives"
    calls = by_call(seen)
    for call, ranks in calls:
        members = call.ranks or tuple(range(seen.world_size))
        absent = [rank for rank in members if rank not in ranks]
        missing = f"; not there: {in_words(absent, most=32)}" if absent else ""
        yield f"  {call} of ranks {_short(members)}: {in_words(ranks, most=32)} for {call.age_s:.0f} s{missing}"
    if not calls:
        yield "  no rank waits in one"
    yield ""
    yield "Ranks"
    for rank in range(seen.world_size):
        record = seen.records.get(rank)
        yield from _rank_lines(seen, rank, record) if record else [f"  rank {rank}: no record"]
    for rank, stacks in sorted(seen.stacks.items()):
        yield ""
        yield f"Stacks of rank {rank}"
        yield from (f"  {line}" for line in stacks.text.rstrip("\n").splitlines())


def _rank_lines(seen: Observations, rank: int, record: RankRecord) -> Iterator[str]:
    state = seen.states.get(rank)
    process = "" if state is None else f", {STATES.get(state, 'gone')}"
    steps = "before the first step" if record.step is None else f"{record.step} steps done"
    code = seen.exits.get(rank)
    ended = "" if code is None else f", exit code {code % UNSAID if code > 0 else code}"
    yield f"  rank {rank}: pid {record.pid} on {record.host}{process}{ended}, {steps}"
    silent_s = record.silent_s(seen.now)
    if silent_s:
        yield f"    no sign of life for {silent_s:.0f} s"
    for phase in record.phases:
        limit = f" of at most {phase.deadline_s:.0f} s" if phase.deadline_s is not None else ""
        note = f" ({phase.note})" if phase.note else ""
        yield f"    in {phase.name}{note} for {phase.seconds:.0f} s{limit}"
    if record.waiting is not None:
        yield f"    waits in {record.waiting} for {record.waiting.age_s:.0f} s"
    if record.place is not None:
        inside = f", called by {record.place.users}" if record.place.users else ""
        yield f"    at {record.place.function} ({record.place.file}:{record.place.line}){inside}"
    if record.collectives:
        yield f"    last collectives: {', '.join(map(str, record.collectives))}"
    memory = [f"{kind} {in_units(nbytes)}" for kind, nbytes in record.memory.items() if nbytes]
    stacks = seen.stacks.get(rank)
    yield f"    memory: {', '.join(memory) or 'unknown'}" + (f"; {stacks.memory}" if stacks is not None else "")
    if record.ended is not None:
        failed = f" in {record.ended.waiting}" if record.ended.waiting is not None else ""
        yield f"    ended: {record.ended.kind}{failed} {record.ended.message}".rstrip()
    yield from (f"    log: {line}" for line in record.log)


def _short(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) <= 16 else f"{ranks[0]}, {ranks[1]}, ... {ranks[-1]}"
