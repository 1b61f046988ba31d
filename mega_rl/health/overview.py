"""Overview of a run from its folder: a table of ranks while it lives, the newest report and the last end afterwards."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from mega_rl.errors import UserError
from mega_rl.health.diagnosis import name_cause
from mega_rl.health.evidence import Evidence, gather
from mega_rl.health.processes import process_state
from mega_rl.health.records import RankRecord, health_folder, read_records
from mega_rl.health.report import newest_report
from mega_rl.health.stacks import WITHIN_S, stacks_of

GOOD_ENDS = ("done", "stopped")
MAX_ROWS = 64
COLUMNS = ("rank", "process", "step", "phase", "waits in", "at")
CELL = 60  # characters


def overview(run_dir: Path, *, stacks: bool = False) -> tuple[list[str], int]:
    """Return (lines, exit code): 1 if the run's last end was a hang or failure, 0 if it lives or ended well.

    stacks: those of this host's living ranks, too. Raises UserError for a folder without records and reports.
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
    evidence = replace(gather(run_dir, world_size=world_size), states=now)
    records = {**evidence.records}  # newer than the states: a rank that has ended since then says so here
    if any(is_living(evidence, record) for record in records.values()):
        return [*_table(evidence), *(_stacks(run_dir, evidence) if stacks else [])], 0
    lines = [*(_table(evidence) if records else [])]
    if report is not None:
        lines += ["", f"{report[0]}:", *report[1].rstrip("\n").splitlines()]
    if records and all(record.ended is not None and record.ended.kind in GOOD_ENDS for record in records.values()):
        return [*lines, "", _end_of(records[min(records)])], 0
    if report is None:
        cause = name_cause(evidence)
        lines += ["", cause[0] if cause is not None else _end_of(records[min(records)])]
    return lines, 1


def is_living(evidence: Evidence, record: RankRecord) -> bool:
    """Return whether a rank may still run: its process is there, or, on another host, its beats come."""
    if record.ended is not None:
        return False
    state = evidence.states.get(record.rank)
    return not record.silent_s(evidence.now) if state is None else state.alive


def _end_of(record: RankRecord) -> str:
    if record.ended is None:
        return "the run has ended without a word"
    after = "before its first step" if record.ended.step is None else f"after step {record.ended.step}"
    return f"ended: {record.ended.kind}, {after} {record.ended.message}".rstrip()


def _table(evidence: Evidence) -> Iterator[str]:
    """Yield the rows of ranks, the silent ones first where there are too many for all."""
    ranks = sorted(evidence.records)
    shown = ranks
    if len(ranks) > MAX_ROWS:
        shown = sorted(sorted(ranks, key=lambda rank: -evidence.records[rank].silent_s(evidence.now))[:MAX_ROWS])
    rows = [COLUMNS, *(_row(evidence, evidence.records[rank]) for rank in shown)]
    widths = [min(CELL, max(len(row[column]) for row in rows)) for column in range(len(COLUMNS))]
    for row in rows:
        yield "  ".join(_fitted(cell, width) for cell, width in zip(row, widths, strict=True)).rstrip()
    if len(ranks) > len(shown):
        yield f"and {len(ranks) - len(shown)} more ranks"
    missing = evidence.world_size - len(ranks)
    if missing > 0:
        yield f"{missing} of {evidence.world_size} ranks have no record"


def _row(evidence: Evidence, record: RankRecord) -> tuple[str, ...]:
    step = "-" if record.step is None else str(record.step)
    process = f"{record.pid} {record.host}"
    state = evidence.states.get(record.rank)
    if record.ended is not None:
        return str(record.rank), process, step, f"ended: {record.ended.kind}", str(record.ended.waiting or "-"), "-"
    silent_s = record.silent_s(evidence.now)
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


def _fitted(cell: str, width: int) -> str:
    return cell.ljust(width) if len(cell) <= width else "..." + cell[len(cell) - width + 3 :]


def _stacks(run_dir: Path, evidence: Evidence) -> Iterator[str]:
    """Yield the stacks of this host's ranks that live."""
    deadline = time.monotonic() + WITHIN_S
    for rank, record in evidence.records.items():
        state = evidence.states.get(rank)
        if state is None or not is_living(evidence, record):
            continue
        yield ""
        yield f"Stacks of rank {rank}"
        text = stacks_of(run_dir, rank, record.pid, state, deadline=deadline)
        yield from (f"  {line}" for line in text.rstrip("\n").splitlines())
