"""Records of ranks, a small file each in RUN_DIR/health, and kinds of ends.

A file is a JSON object of fixed length, `{"record": ..., "crc32": ...}` and blanks. One write without a rename is
cheap enough for thousands of ranks on a shared file system. The checksum finds files read while they were written.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import time
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from mega_rl.errors import HungError, StalledError, UserError, name_of_signal
from mega_rl.untrusted import parse_object, read_file, read_record

FOLDER = "health"  # in the run's folder
FILE_BYTES = 16_384  # size of every record
MAX_RANKS = 65_536  # records read from one folder
MAX_TEXT = 400  # characters written of a text
MAX_PHASES = 8
MAX_COLLECTIVES = 16
MAX_LOG_LINES = 6
MAX_MEMBERS = 2000  # ranks written of a group, the first ones
TRIES = 3  # reads of a file that may be in the middle of a write
PAUSE_S = 0.02

RANK_NAME = re.compile(r"rank_([0-9]{5})\.json")
ENDS = ("done", "stopped", "error", "timeout", "lost peer", "hung")
# Letters of /proc/PID/stat.
STATES: Mapping[str, str] = {
    "R": "running",
    "S": "waiting",
    "D": "in the kernel, where nothing interrupts it: a file system or a device does not answer",
    "T": "stopped",
    "t": "stopped by a debugger",
}
STOPPED = ("T", "t")
SAVE_S = 300.0  # for ranks that were told to stop: to end their step and save

GENERATION = "MEGA_RL_GENERATION"  # environment variable of ranks that a launcher of this package has started
# Exit codes of ranks that a launcher has started and that did nothing wrong: the connection to another rank broke
# (EX_TEMPFAIL of sysexits.h), or another rank did not come to a collective in time. The launcher names the cause.
LOST_PEER_CODE, TIMEOUT_CODE = 75, 76
INNOCENT_CODES: Mapping[str, int] = {"lost peer": LOST_PEER_CODE, "timeout": TIMEOUT_CODE}  # kind of failure: exit code
UNSAID = 256  # added to the exit code of a rank whose command did not report that it ends with that code
# Messages of ranks that another rank has ended, outside of a run, whose guard names phase and collective.
BY_OTHERS = {
    LOST_PEER_CODE: "lost the connection to another rank, which has ended; what it said, if anything, is the cause",
    TIMEOUT_CODE: "waited in a collective for a rank that did not come in time",
}

# Words of gloo, NCCL and torch's store, in which ranks meet before they have groups.
LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket closed by peer",
    "Application timeout caused pair closure",
    "Connection was likely closed",
    "failed to recv, got 0 bytes",
    "Connection refused",
    "NCCL communicator was aborted",
    "remote process exited or there was a network error",
    "ncclRemoteError",
)
WHOLE_TEXTS = ("Application timeout caused pair closure",)  # an error of gloo that does not name it
OF_THE_STORE = ("DistNetworkError", "DistStoreError")
TIMED_OUT = (
    "Timed out waiting",
    "timed out after",
    "Timed out after",
    "Watchdog caught collective operation timeout",
    "wait timeout after",
    "Wait timeout",
    "Socket Timeout",
    "Gloo connectFullMesh failed",
    "monitoredBarrier",
)
BACKENDS = ("gloo", "NCCL", "nccl", "TCPStore", "store", "c10d", "rendezvous", "Rendezvous")


@dataclass(frozen=True)
class PhaseRecord:
    """A phase in progress (`mega_rl.tracking.progress`)."""

    name: str
    seconds: float  # since it began
    deadline_s: float | None = None  # its owner gives up then
    note: str = ""


@dataclass(frozen=True)
class Place:
    """Line that the main thread is at."""

    function: str
    file: str
    line: int
    users: str = ""  # the user's function that the package called and that has not returned
    seconds: float = 0.0  # time that the thread was seen at this very line


@dataclass(frozen=True)
class Collective:
    """A collective or a message between two ranks, as the flight recorder has it."""

    operation: str  # all_reduce
    group: str  # dp
    ranks: tuple[int, ...]  # members of the group, the first `MAX_MEMBERS`; empty: not known
    sequence: int | None  # number in its group, the same on all ranks; None: not counted
    age_s: float = 0.0  # since it was called
    deadline_s: float | None = None  # it fails then

    def __str__(self) -> str:
        return f"{self.group} {self.operation}" + ("" if self.sequence is None else f" {self.sequence}")


@dataclass(frozen=True)
class LastWords:
    """End of a rank, by itself."""

    kind: str  # one of `ENDS`
    message: str
    step: int | None  # steps done; None before the first step
    phase: str
    waiting: Collective | None = None  # the collective that failed


@dataclass(frozen=True)
class RankRecord:
    """State of one rank at its last beat."""

    rank: int
    world_size: int
    generation: int  # number of the restart inside the job
    pid: int
    started: int  # the kernel's time of the process's start; tells it from a later process with the same pid
    host: str
    beat: float  # time.time() of the last write
    interval_s: float  # between writes
    timeout_s: float  # deadline of a collective, trainer.timeout_s
    step: int | None = None  # steps done; None before the first step
    phases: tuple[PhaseRecord, ...] = ()  # the outermost first
    place: Place | None = None
    waiting: Collective | None = None  # the oldest collective in flight; None while the rank works
    collectives: tuple[Collective, ...] = ()  # the last of each group
    memory: Mapping[str, int] = field(default_factory=dict)  # bytes by kind: "resident", "device"
    log: tuple[str, ...] = ()  # the last lines
    ended: LastWords | None = None

    @property
    def phase(self) -> str:
        """Return the name of the innermost phase; empty without one."""
        return self.phases[-1].name if self.phases else ""

    @property
    def process_state(self) -> str:
        """Return the state letter of this rank's process; empty once it has ended."""
        state, started = state_and_start(self.pid)
        return state if started == self.started else ""


def silent_s(record: RankRecord, now: float) -> float:
    """Return the seconds without a beat; 0 while in time and after the end."""
    age = now - record.beat
    return age if record.ended is None and age > 3 * record.interval_s + 1.0 else 0.0


def ending(code: int) -> str:
    """Return how a rank ended, in words; code: as of `RankEnd`."""
    if code >= UNSAID:
        return f"ended with exit code {code - UNSAID} before its work was done"
    return f"ended with exit code {code}" if code >= 0 else f"was killed by {name_of_signal(-code)}"


def state_and_start(pid: int) -> tuple[str, int]:
    """Return a process's state letter and start by the kernel's time; ("", 0) once ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return "", 0
    return ("", 0) if fields[0] in "ZX" else (fields[0], int(fields[19]))


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
        # Escapes of texts or long lists of ranks are too long: drop the fields that a diagnosis needs least.
        name = next(name for name in ("log", "collectives", "phases") if fields[name])
        fields[name] = []


def read_records(run_dir: Path) -> dict[int, RankRecord]:
    """Return the valid records of a run's latest generation by rank."""
    files = (RANK_NAME.fullmatch(name) for name in _names(health_folder(run_dir)))
    ranks = sorted(int(file[1]) for file in files if file)[:MAX_RANKS]
    records = {rank: record for rank in ranks if (record := load_record(run_dir, rank)) is not None}
    latest = max((record.generation for record in records.values()), default=0)
    return {rank: record for rank, record in records.items() if record.generation == latest}


def load_record(run_dir: Path, rank: int) -> RankRecord | None:
    """Return the record of a rank; None for a missing or damaged file."""
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
    """Remove the records, stacks and claims of earlier processes, but not the reports."""
    for name in _names(health_folder(run_dir)):
        if name.startswith(("rank_", "stacks_", "claim_")):
            with contextlib.suppress(OSError):
                os.unlink(health_folder(run_dir) / name)


def decode(content: bytes) -> RankRecord | None:
    """Return the record in a file's bytes; None if anything is wrong with them."""
    try:
        raw = parse_object(content)
        record = read_record(RankRecord, raw.get("record"))
        checksum = _checksum(raw["record"])
    except (ValueError, RecursionError):
        return None
    if raw.get("crc32") != checksum or (record.ended is not None and record.ended.kind not in ENDS):
        return None
    return record


def _names(folder: Path) -> list[str]:
    """Return the names in a folder; none for a link, a missing or an unreadable folder."""
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


def has_launcher() -> bool:
    """Return whether a launcher of this package started this rank and reports its end."""
    return GENERATION in os.environ


def innocent_code(error: BaseException) -> int | None:
    """Return the exit code of a rank that another rank brought down, else None.

    The first error of a chain decides: later ones come up while files and groups are closed.
    """
    while (before := error.__cause__ or (None if error.__suppress_context__ else error.__context__)) is not None:
        error = before
    return INNOCENT_CODES.get(kind_of(error))


def kind_of(error: BaseException) -> str:
    """Return "lost peer" or "timeout" for an error of another rank, else "hung", "stopped", "error"."""
    if not isinstance(error, Exception | SystemExit):
        return "stopped"
    if isinstance(error, StalledError | HungError):
        return "timeout" if isinstance(error, StalledError) else "hung"
    # The errors of torch.distributed are RuntimeErrors; any other class comes from a user's code.
    if not isinstance(error, RuntimeError | TimeoutError):
        return "error"
    text = str(error)
    if text not in WHOLE_TEXTS and not any(
        backend in text or backend in type(error).__name__ for backend in (*BACKENDS, "Dist")
    ):
        return "error"
    if any(words in text for words in LOST_PEER):
        return "lost peer"
    if any(words in text for words in TIMED_OUT):
        return "timeout"
    return "lost peer" if type(error).__name__ in OF_THE_STORE else "error"
