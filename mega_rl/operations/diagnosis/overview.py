"""Show a run from its folder: a table of its ranks, or its newest report and end."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from mega_rl.errors import UserError
from mega_rl.operations.diagnosis.cause import name_cause
from mega_rl.operations.diagnosis.observations import Observations, observe
from mega_rl.operations.diagnosis.report import newest_report
from mega_rl.operations.diagnosis.stacks import WITHIN_S, stacks_of
from mega_rl.tracking.health.process_state import process_state
from mega_rl.tracking.health.records import RankRecord, health_folder, read_records

GOOD_ENDS = ("done", "stopped")
MAX_ROWS = 64
COLUMNS = ("rank", "process", "step", "phase", "waits in", "at")
CELL = 60  # characters


def overview(run_dir: Path, *, stacks: bool = False) -> tuple[list[str], int]:
    """Return (lines, exit code): 1 if the run's last end was a hang or failure, else 0.

    stacks: show also the stacks of this host's living ranks. Raises UserError for a folder without records and reports.
    """
    records = read_records(run_dir)
    report = newest_report(run_dir)
    if not records and report is None:
        raise UserError(
            f"--run={run_dir}: {health_folder(run_dir)} holds no records of ranks; give the trainer.run_dir of a run "
            "that has begun"
        )
    world_size = max((record.world_size for record in records.values()), default=0)
    host = socket.gethostname()
    now = {rank: process_state(one.pid, one.started) for rank, one in records.items() if one.host == host}
    seen = replace(observe(run_dir, world_size=world_size), states=now)
    records = {**seen.records}  # newer than the states: ranks that ended since then have last words here
    if any(is_living(seen, record) for record in records.values()):
        lines, deadline = [*_table(seen)], time.monotonic() + WITHIN_S
        for rank, record in records.items() if stacks else ():
            if is_living(seen, record) and rank in now:
                text = stacks_of(run_dir, rank, record.pid, now[rank], deadline=deadline)
                lines += ["", f"Stacks of rank {rank}", *(f"  {line}" for line in text.rstrip("\n").splitlines())]
        return lines, 0
    lines = [*(_table(seen) if records else [])]
    if report is not None:
        lines += ["", f"{report[0]}:", *report[1].rstrip("\n").splitlines()]
    if records and all(record.ended is not None and record.ended.kind in GOOD_ENDS for record in records.values()):
        return [*lines, "", _end_of(records[min(records)])], 0
    if report is None:
        cause = name_cause(seen)
        lines += ["", cause[0] if cause is not None else _end_of(records[min(records)])]
    return lines, 1


def is_living(seen: Observations, record: RankRecord) -> bool:
    """Return whether a rank may still run: its process lives, or its beats come in time."""
    if record.ended is not None:
        return False
    state = seen.states.get(record.rank)
    return not record.silent_s(seen.now) if state is None else state.alive


def _end_of(record: RankRecord) -> str:
    if record.ended is None:
        return "the run has ended without a word"
    after = "before its first step" if record.ended.step is None else f"after step {record.ended.step}"
    return f"ended: {record.ended.kind}, {after} {record.ended.message}".rstrip()


def _table(seen: Observations) -> Iterator[str]:
    """Yield a header and a row for each rank; only silent ranks if there are many."""
    ranks = sorted(seen.records)
    shown = ranks
    if len(ranks) > MAX_ROWS:
        shown = sorted(sorted(ranks, key=lambda rank: -seen.records[rank].silent_s(seen.now))[:MAX_ROWS])
    rows = [COLUMNS, *(_row(seen, seen.records[rank]) for rank in shown)]
    widths = [min(CELL, max(len(row[column]) for row in rows)) for column in range(len(COLUMNS))]
    for row in rows:
        cells = (cell if len(cell) <= CELL else f"...{cell[3 - CELL :]}" for cell in row)
        yield "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
    if len(ranks) > len(shown):
        yield f"and {len(ranks) - len(shown)} more ranks"
    missing = seen.world_size - len(ranks)
    if missing > 0:
        yield f"{missing} of {seen.world_size} ranks have no record"


def _row(seen: Observations, record: RankRecord) -> tuple[str, ...]:
    step = "-" if record.step is None else str(record.step)
    process = f"{record.pid} {record.host}"
    state = seen.states.get(record.rank)
    if record.ended is not None:
        return str(record.rank), process, step, f"ended: {record.ended.kind}", str(record.ended.waiting or "-"), "-"
    silent_s = record.silent_s(seen.now)
    phase = record.phases[-1] if record.phases else None
    doing = "-" if phase is None else f"{phase.name} {phase.seconds:.0f} s"
    if state is not None and not state.alive:
        doing = "gone without a word"
    elif state is not None and state.stopped:
        doing = f"STOPPED, last seen in {doing}"
    elif silent_s:
        doing = f"SILENT for {silent_s:.0f} s, last seen in {doing}"
    waiting = "-" if record.waiting is None else f"{record.waiting} {record.waiting.age_s:.0f} s"
    place = "-" if record.place is None else f"{record.place.function} {record.place.file}:{record.place.line}"
    return str(record.rank), process, step, doing, waiting, place
