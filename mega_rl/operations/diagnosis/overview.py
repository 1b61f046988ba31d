"""Show a run from its folder while it lives, or its newest report and end."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

from mega_rl.errors import UserError
from mega_rl.operations.diagnosis.cause import name_cause
from mega_rl.operations.diagnosis.observations import observe
from mega_rl.operations.diagnosis.report import lines_of, newest_report
from mega_rl.operations.diagnosis.stacks import collect, read_stacks
from mega_rl.tracking.health.records import RankRecord, health_folder

GOOD_ENDS = ("done", "stopped")


def overview(run_dir: Path, *, stacks: bool = False) -> tuple[list[str], int]:
    """Return (lines, exit code): 1 if the run's last end was a hang or failure, else 0."""
    report, host, seen = newest_report(run_dir), socket.gethostname(), observe(run_dir)
    if not seen.records and report is None:
        raise UserError(
            f"--run={run_dir}: {health_folder(run_dir)} holds no records of ranks; give the trainer.run_dir of a run "
            "that has begun"
        )
    now = {rank: one.process_state() for rank, one in seen.records.items() if one.host == host}
    seen = replace(seen, states=now, stacks={})
    living = [rank for rank in seen.records if seen.may_live(rank)]
    if living:
        if stacks:
            collect(run_dir, {rank: seen.records[rank].pid for rank in living if rank in now})
            read = {rank: one for rank in living if (one := read_stacks(run_dir, rank)) is not None}
            seen = replace(seen, stacks=read)
        return [*lines_of(seen)], 0
    if seen.records and all(one.ended is not None and one.ended.kind in GOOD_ENDS for one in seen.records.values()):
        return [*lines_of(seen), "", _end_of(seen.records[min(seen.records)])], 0
    if report is not None:
        return [f"{report[0]}:", *report[1].rstrip("\n").splitlines()], 1
    return [*lines_of(seen), "", name_cause(seen) or _end_of(seen.records[min(seen.records)])], 1


def _end_of(record: RankRecord) -> str:
    if record.ended is None:
        return "the run has ended without a word"
    after = "before its first step" if record.ended.step is None else f"after step {record.ended.step}"
    return f"ended: {record.ended.kind}, {after} {record.ended.message}".rstrip()
