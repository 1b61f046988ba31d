"""Records of ranks: one small file per rank in RUN_DIR/health, written in place every few seconds and at the end.

A file is a JSON object of fixed length, `{"record": ..., "crc32": ...}` and blanks: one write without a rename, which
a shared file system takes from thousands of ranks. The checksum finds a file that was read while it was written.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from mega_rl.checkpoint.format.untrusted import is_count, is_number, read_file
from mega_rl.errors import UserError
from mega_rl.storage.strict_json import parse_object

Value = TypeVar("Value")

FOLDER = "health"  # in the run's folder
FILE_BYTES = 16_384  # of every record
MAX_RANKS = 65_536  # read from one folder
MAX_TEXT = 400  # characters of a text
MAX_PHASES = 8
MAX_COLLECTIVES = 16
MAX_LOG_LINES = 6
MAX_MEMBERS = 2000  # ranks of a group that are written out; larger groups have the first of them
MAX_KINDS = 8  # of memory
MAX_NUMBER = 1e15
TRIES = 3  # of a file that was read while it was written
PAUSE_S = 0.02

RANK_NAME = re.compile(r"rank_([0-9]{5})\.json")
ENDS = ("done", "stopped", "error", "timeout", "lost peer", "hung")


@dataclass(frozen=True)
class PhaseRecord:
    """A phase in progress (`mega_rl.tracking.progress`)."""

    name: str
    seconds: float  # since it began
    deadline_s: float | None = None  # after which its owner gives up
    note: str = ""


@dataclass(frozen=True)
class Place:
    """Line that the main thread is at."""

    function: str
    file: str
    line: int
    users: str = ""  # function of the user's own code that the package has called, and that has not returned
    seconds: float = 0.0  # that the thread was seen at this very line


@dataclass(frozen=True)
class Collective:
    """A collective or a message between two ranks, as the flight recorder has it."""

    operation: str  # all_reduce
    group: str  # dp
    ranks: tuple[int, ...]  # of the group, the first `MAX_MEMBERS`; empty where they are not known
    sequence: int | None  # number in its group, the same on all ranks; None where nobody counts
    age_s: float = 0.0  # since it was called
    deadline_s: float | None = None  # after which it fails

    def __str__(self) -> str:
        return f"{self.group} {self.operation}" + ("" if self.sequence is None else f" {self.sequence}")


@dataclass(frozen=True)
class LastWords:
    """End of a rank, by itself."""

    kind: str  # one of `ENDS`
    message: str
    step: int | None  # steps done, None before the first began
    phase: str
    waiting: Collective | None = None  # that failed


@dataclass(frozen=True)
class RankRecord:
    """State of one rank at its last beat."""

    rank: int
    world_size: int
    generation: int  # number of the restart inside the job that the rank belongs to
    pid: int
    started: int  # the kernel's time of the process's start: another process of the same number has another; 0 unknown
    host: str
    beat: float  # time.time() of the last write
    interval_s: float  # between writes
    timeout_s: float  # deadline of a collective, trainer.timeout_s
    step: int | None = None  # steps done, None before the first began
    phases: tuple[PhaseRecord, ...] = ()  # the outermost first
    place: Place | None = None
    waiting: Collective | None = None  # the oldest collective that has not ended; None while the rank works
    collectives: tuple[Collective, ...] = ()  # the last of each group, as of the last look
    memory: Mapping[str, int] = field(default_factory=dict)  # bytes by kind: "resident", "device"
    log: tuple[str, ...] = ()  # the last lines
    ended: LastWords | None = None

    @property
    def phase(self) -> str:
        """Return the innermost phase that is not a loop around others; empty without one."""
        return self.phases[-1].name if self.phases else ""

    def silent_s(self, now: float) -> float:
        """Return the seconds without a sign of life at `now`, 0 while beats come as they should or after the end."""
        age = now - self.beat
        return age if self.ended is None and age > 3 * self.interval_s + 1.0 else 0.0


def health_folder(run_dir: Path) -> Path:
    """Return the folder of records, stacks and reports of a run."""
    return run_dir / FOLDER


def record_path(run_dir: Path, rank: int) -> Path:
    """Return the file of a rank's record."""
    return health_folder(run_dir) / f"rank_{rank:05d}.json"


def write_record(run_dir: Path, record: RankRecord) -> None:
    """Write a rank's record in place. Raises OSError."""
    path = record_path(run_dir, record.rank)
    data = encode(record)
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags, 0o644)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, flags, 0o644)
    try:
        os.pwrite(descriptor, data, 0)
    finally:
        os.close(descriptor)  # a network file system sends the bytes now


def encode(record: RankRecord) -> bytes:
    """Return a record as the bytes of its file, texts cut to their limits."""
    record = replace(
        record,
        phases=record.phases[-MAX_PHASES:],
        collectives=record.collectives[:MAX_COLLECTIVES],
        log=record.log[-MAX_LOG_LINES:],
    )
    fields: dict[str, object] = {name: _cut(value) for name, value in asdict(record).items()}
    while True:
        text = json.dumps({"record": fields, "crc32": _checksum(fields)})
        if len(text) < FILE_BYTES:
            return text.ljust(FILE_BYTES - 1).encode() + b"\n"
        # Escapes of texts, or long lists of ranks: what the diagnosis can do without goes first.
        name = next(name for name in ("log", "collectives", "phases") if fields[name])
        fields[name] = []


def read_records(run_dir: Path) -> dict[int, RankRecord]:
    """Return the records of a run by rank, those of its latest generation; damaged and foreign files are left out."""
    records = {}
    for rank in _ranks(health_folder(run_dir)):
        record = read_record(run_dir, rank)
        if record is not None:
            records[rank] = record
    latest = max((record.generation for record in records.values()), default=0)
    return {rank: record for rank, record in sorted(records.items()) if record.generation == latest}


def read_record(run_dir: Path, rank: int) -> RankRecord | None:
    """Return the record of a rank, None for a missing or damaged one."""
    path = record_path(run_dir, rank)
    for attempt in range(TRIES):
        if attempt:
            time.sleep(PAUSE_S)
        try:
            content = read_file(path, FILE_BYTES)
        except UserError:
            return None
        record = decode(content)
        if record is not None:
            return record if record.rank == rank else None
    return None


def clear(run_dir: Path) -> None:
    """Remove the records, stacks and claims of earlier processes; reports stay."""
    for name in _names(health_folder(run_dir)):
        if name.startswith(("rank_", "stacks_", "claim_")):
            with contextlib.suppress(OSError):
                os.unlink(health_folder(run_dir) / name)


def decode(content: bytes) -> RankRecord | None:
    """Return the record in a file's bytes, None where anything is wrong with them."""
    try:
        raw = parse_object(content)
        fields = _fields(raw["record"])
        if raw["crc32"] != _checksum(fields):
            return None
        return _record(fields)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def _ranks(folder: Path) -> list[int]:
    """Return the ranks that have a file, in order."""
    numbers = (RANK_NAME.fullmatch(name) for name in _names(folder))
    return sorted(int(match[1]) for match in numbers if match)[:MAX_RANKS]


def _names(folder: Path) -> list[str]:
    """Return the names in a folder, none for a link, a missing folder or one that cannot be read."""
    try:
        return os.listdir(folder) if stat.S_ISDIR(folder.lstat().st_mode) else []
    except OSError:
        return []


def _checksum(fields: Mapping[str, object]) -> int:
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())


def _cut(value: object) -> object:
    """Return a value with every text cut to its limit."""
    if isinstance(value, str):
        return value if len(value) <= MAX_TEXT else value[: MAX_TEXT - 3] + "..."
    if isinstance(value, dict):
        return {key: _cut(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_cut(one) for one in value[:MAX_MEMBERS]]
    return value


# Readers of values: each raises ValueError for one of another type or range, KeyError for a missing field.


def _record(raw: Mapping[str, object]) -> RankRecord:
    memory = _fields(raw["memory"])
    if len(memory) > MAX_KINDS:
        raise ValueError("too many kinds of memory")
    return RankRecord(
        rank=_count(raw["rank"]),
        world_size=_count(raw["world_size"]),
        generation=_count(raw["generation"]),
        pid=_count(raw["pid"]),
        started=_count(raw["started"]),
        host=_text(raw["host"]),
        beat=_number(raw["beat"]),
        interval_s=_number(raw["interval_s"]),
        timeout_s=_number(raw["timeout_s"]),
        step=_optional(raw["step"], _count),
        phases=tuple(_phase(one) for one in _list(raw["phases"], MAX_PHASES)),
        place=_optional(raw["place"], _place),
        waiting=_optional(raw["waiting"], _collective),
        collectives=tuple(_collective(one) for one in _list(raw["collectives"], MAX_COLLECTIVES)),
        memory={_text(kind): _count(nbytes) for kind, nbytes in memory.items()},
        log=tuple(_text(line) for line in _list(raw["log"], MAX_LOG_LINES)),
        ended=_optional(raw["ended"], _last_words),
    )


def _phase(value: object) -> PhaseRecord:
    raw = _fields(value)
    return PhaseRecord(
        _text(raw["name"]), _number(raw["seconds"]), _optional(raw["deadline_s"], _number), _text(raw["note"])
    )


def _place(value: object) -> Place:
    raw = _fields(value)
    return Place(
        _text(raw["function"]), _text(raw["file"]), _count(raw["line"]), _text(raw["users"]), _number(raw["seconds"])
    )


def _collective(value: object) -> Collective:
    raw = _fields(value)
    return Collective(
        operation=_text(raw["operation"]),
        group=_text(raw["group"]),
        ranks=tuple(_count(rank) for rank in _list(raw["ranks"], MAX_MEMBERS)),
        sequence=_optional(raw["sequence"], _count),
        age_s=_number(raw["age_s"]),
        deadline_s=_optional(raw["deadline_s"], _number),
    )


def _last_words(value: object) -> LastWords:
    raw = _fields(value)
    kind = _text(raw["kind"])
    if kind not in ENDS:
        raise ValueError("not a kind of end")
    return LastWords(
        kind=kind,
        message=_text(raw["message"]),
        step=_optional(raw["step"], _count),
        phase=_text(raw["phase"]),
        waiting=_optional(raw["waiting"], _collective),
    )


def _optional(value: object, read: Callable[[object], Value]) -> Value | None:
    return None if value is None else read(value)


def _fields(value: object) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value


def _count(value: object) -> int:
    if not is_count(value):
        raise ValueError("not a count")
    return value


def _number(value: object) -> float:
    if not is_number(value) or abs(value) > MAX_NUMBER:
        raise ValueError("not a number")
    return float(value)


def _text(value: object) -> str:
    """Return a text without control characters, which could change the reader's terminal."""
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise ValueError("not a text")
    return "".join(character if character.isprintable() else " " for character in value)


def _list(value: object, limit: int) -> list[object]:
    if not isinstance(value, list) or len(value) > limit:
        raise ValueError("not a list")
    return value
