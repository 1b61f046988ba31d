"""Observations of a run's ranks: records, exit codes, process states, stacks, collectives."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import takewhile
from pathlib import Path

import psutil

from mega_rl.errors import UserError, in_units
from mega_rl.tracking.health.records import (
    INNOCENT_CODES,
    STATES,
    STOPPED,
    UNSAID,
    Collective,
    RankRecord,
    health_folder,
    load_record,
    read_records,
    silent_s,
    state_and_start,
)
from mega_rl.untrusted import parse_object, read_file, read_record

WITHIN_S = 10.0  # for all ranks of a host
ONE_S = 4.0  # for one try on one process
TRIES = 2  # a process that runs on while its stacks are read may change them
AT_A_TIME = 4
MAX_STACK_BYTES = 262_144  # stacks of one rank


@dataclass(frozen=True)
class Stacks:
    """State, memory and stacks of a rank's process."""

    state: str  # letter of its state; empty: it had ended
    memory: str  # memory of process and host, in words
    text: str = ""  # stacks of its threads, or the reason why there are none

    @property
    def top(self) -> str:
        """Return the main thread's innermost line in this package, else its innermost line; empty without stacks."""
        lines = self.text.splitlines()
        threads = [i for i, line in enumerate(lines) if line.startswith("Thread ")]
        if not threads:
            return ""
        main = next((i for i in threads if '"MainThread"' in lines[i]), threads[0])
        stack = [line.strip()[:200] for line in takewhile(lambda line: line.startswith(" "), lines[main + 1 :])]
        return next((line for line in stack if "(mega_rl/" in line), next(iter(stack), ""))


def collect(run_dir: Path, processes: Mapping[int, int]) -> None:
    """Write state, memory and stacks of this host's ranks (rank -> pid), within `WITHIN_S`."""
    deadline = time.monotonic() + WITHIN_S

    def collect_one(rank: int, pid: int) -> None:
        write_stacks(run_dir, rank, pid, stacks_of(pid, deadline=deadline))

    with ThreadPoolExecutor(AT_A_TIME, thread_name_prefix="stacks") as pool:
        list(pool.map(collect_one, processes.keys(), processes.values()))


def stacks_path(run_dir: Path, rank: int) -> Path:
    """Return the file of a rank's stacks."""
    return health_folder(run_dir) / f"stacks_{rank:05d}.txt"


def read_stacks(run_dir: Path, rank: int) -> Stacks | None:
    """Return the stacks that `collect` wrote for a rank; None without readable ones."""
    try:
        content = read_file(stacks_path(run_dir, rank), MAX_STACK_BYTES + 4096)
        head, _, text = content.partition(b"\n")
        stacks = read_record(Stacks, {**parse_object(head), "text": ""})
    except (UserError, ValueError):
        return None
    return replace(
        stacks, text="".join(c if c.isprintable() or c == "\n" else " " for c in text.decode(errors="replace"))
    )


def stacks_of(pid: int, *, deadline: float) -> str:
    """Return a process's stacks, or why there are none. deadline: on the monotonic clock."""
    program = find_py_spy()
    if program is None:
        return "no stacks: py-spy is not installed"
    # Without --nonblocking py-spy would pause the rank, and cannot read one that is stopped or in the kernel.
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    reason = "there was no time"
    for _ in range(TRIES):
        left_s = min(ONE_S, deadline - time.monotonic())
        if left_s <= 0:
            break
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=left_s, check=False)
        except subprocess.TimeoutExpired:
            reason = f"py-spy gave no answer in {left_s:.0f} s"
            continue
        text = done.stdout.decode(errors="replace")
        if done.returncode == 0 and "Thread" in text:
            return text[text.index("Thread") :]  # without the command line
        reason = "py-spy: " + " ".join(done.stderr.decode(errors="replace").split())[:400]
    return f"no stacks: {reason}"


def find_py_spy() -> str | None:
    """Return the program next to this Python, or on the path; None without it."""
    return shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")


def write_stacks(run_dir: Path, rank: int, pid: int, text: str) -> None:
    """Write a rank's state, memory and stacks into the run's folder; ignores errors of files."""
    host, resident = psutil.virtual_memory(), 0
    with suppress(psutil.Error):
        resident = psutil.Process(pid).memory_info().rss
    memory = f"process {in_units(resident)}, host {in_units(host.available)} free of {in_units(host.total)}"
    head = {"state": state_and_start(pid)[0], "memory": memory}
    content = json.dumps(head).encode() + b"\n" + text.encode(errors="replace")[:MAX_STACK_BYTES]
    path = stacks_path(run_dir, rank)
    with suppress(OSError):
        path.unlink(missing_ok=True)
        write_new(path, content)


def write_new(path: Path, content: bytes) -> None:
    """Write a file below a run's health folder, which must not exist. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    with open(descriptor, "wb") as file:
        file.write(content)


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
            now = record.process_state
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


MAX_BYTES = 4 << 20
NAME = re.compile(r"report_\d{8}_\d{6}_\d{6}\.txt")


def write_report(run_dir: Path, seen: Observations, cause: str) -> Path | None:
    """Write a report and return its path; None if the file system refuses."""
    text = "\n".join([*lines_of(seen), "", cause, ""])
    path = health_folder(run_dir) / datetime.now().strftime("report_%Y%m%d_%H%M%S_%f.txt")
    try:
        write_new(path, text.encode(errors="replace")[-MAX_BYTES:])
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
    if silent := silent_s(record, seen.now):
        yield f"    no sign of life for {silent:.0f} s"
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
