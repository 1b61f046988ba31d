"""End of a rank: last words, one line in place of the backend's error, and the cause where no launcher looks for it."""

from __future__ import annotations

import os
import socket
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from mega_rl.errors import PeerError, RunError, StalledError, UserError
from mega_rl.health.diagnosis import diagnose
from mega_rl.health.endings import kind_of
from mega_rl.health.evidence import INNOCENT, in_phase
from mega_rl.health.heartbeat import Heartbeat, RankFacts
from mega_rl.health.places import place_of_error
from mega_rl.health.processes import process_state
from mega_rl.health.records import LastWords, health_folder, read_records
from mega_rl.health.stacks import WITHIN_S, collect, write_stacks

GRACE_S = 1.5  # within which ranks that wait in the same collective say that it failed
LOOK_S = 0.1


class Guard:
    """Context manager that writes the last words of a rank that fails inside.

    An error that another rank has caused leaves it as a PeerError of one line: phase, step and collective, or the
    cause, where no launcher looks for it; a HungError as a RunError.
    """

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat

    def __enter__(self) -> Guard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write the last words for an error. Raises PeerError for one that another rank has caused."""
        heartbeat, facts = self._heartbeat, self._heartbeat.facts
        if error is None or heartbeat.ended is not None:  # said by a guard further inside
            return
        text = str(error) or type(error).__name__
        if isinstance(error, SystemExit):  # from user code or a library; code 0 would mean success
            place = place_of_error(error)
            where = "" if place is None else f" (at {place.file}:{place.line} in {place.function})"
            text = f"SystemExit({error.code}) was raised inside of the run{where}"
        words = heartbeat.end(kind_of(error), text, error=error)
        if isinstance(error, UserError) and words.step is None:
            heartbeat.withdraw()
        if isinstance(error, SystemExit):
            raise RunError(text) from error
        if words.kind not in (*INNOCENT, "hung"):
            return
        own = "".join(traceback.format_exception(error))
        write_stacks(facts.run_dir, facts.rank, os.getpid(), process_state(os.getpid()), own)
        cause = None if facts.launched else investigate(facts)
        if words.kind == "hung":
            raise RunError(cause or str(error)) from error
        line = str(error) if isinstance(error, StalledError) else innocent_line(words, facts.timeout_s)
        raise PeerError(cause or line) from error


def innocent_line(words: LastWords, timeout_s: float) -> str:
    """Return the line of a rank that failed because of another one."""
    where = in_phase(words.phase, words.step)
    call = "" if words.waiting is None else f" in {words.waiting}"
    if words.kind == "timeout":
        return f"waited {timeout_s:g} s (trainer.timeout_s){call}{where} for a rank that did not come"
    lost = f"lost the connection to another rank{call}{where}"
    return f"{lost}: it has ended, and what it said, if anything, is the cause"


def investigate(facts: RankFacts) -> str | None:
    """Return the cause of a failure that this rank has noticed, None where another rank says it or nobody knows.

    Of the ranks that notice, one on each host collects stacks, and the lowest one writes the report.
    """
    folder = health_folder(facts.run_dir)
    time.sleep(min(GRACE_S, facts.interval_s + 0.3))
    host = socket.gethostname()
    stacks, cause = _stacks_claim(host, facts), f"claim_cause_{facts.generation}"
    records = read_records(facts.run_dir)
    if _claim(folder / stacks):
        living = {rank: one.pid for rank, one in records.items() if one.host == host and one.ended is None}
        collect(facts.run_dir, living)
        _settle(folder / stacks, "collected")
    noticed = [rank for rank, one in records.items() if one.ended is not None and one.ended.kind in INNOCENT]
    if facts.rank > min(noticed, default=facts.rank) and _is_settled(folder / cause, within_s=WITHIN_S):
        return None
    if not _claim(folder / cause):
        return None
    _is_settled(folder / stacks, within_s=WITHIN_S)
    for other in {records[rank].host for rank in noticed} - {host}:
        _is_settled(folder / _stacks_claim(other, facts), within_s=GRACE_S)
    diagnosis = diagnose(facts.run_dir, exits=None, world_size=facts.world_size)
    _settle(folder / cause, "unknown" if diagnosis is None else diagnosis.cause)
    if diagnosis is None:
        return None
    return diagnosis.cause if diagnosis.report is None else f"{diagnosis.cause} (report: {diagnosis.report})"


def _stacks_claim(host: str, facts: RankFacts) -> str:
    name = "".join(character if character.isalnum() or character == "-" else "_" for character in host)
    return f"claim_stacks_{name}_{facts.generation}"


def _claim(path: Path) -> bool:
    """Return whether this rank is the first to claim a job, by making its file."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644))
    except OSError:
        return False
    return True


def _settle(path: Path, outcome: str) -> None:
    """Write a claimed job's outcome, which others wait for."""
    with suppress(OSError):
        path.write_text(outcome)


def _is_settled(path: Path, *, within_s: float) -> bool:
    """Return whether a job has its outcome within so many seconds."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        with suppress(OSError):
            if path.stat().st_size:
                return True
        time.sleep(LOOK_S)
    return False
