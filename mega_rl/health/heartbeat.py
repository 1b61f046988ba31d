"""Heartbeat of a rank: a thread that writes the rank's record every few seconds, and the rank's last words."""

from __future__ import annotations

import faulthandler
import logging
import os
import queue
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Protocol

from mega_rl.health.places import MainThread, place_of_error
from mega_rl.health.processes import resident_bytes, start_time
from mega_rl.health.records import (
    MAX_LOG_LINES,
    MAX_TEXT,
    Collective,
    LastWords,
    PhaseRecord,
    RankRecord,
    health_folder,
    record_path,
    write_record,
)
from mega_rl.tracking import progress

log = logging.getLogger(__name__)

LONGEST_INTERVAL_S = 5.0
SHORTEST_INTERVAL_S = 0.2
INTERVALS_PER_DEADLINE = 10
RANKS_OF_A_FOLDER = 200  # ranks that may write a record in one second
WRITE_S = 2 * LONGEST_INTERVAL_S  # a file system that hangs holds up the rank's end no longer
LOOKS = 6  # beats after which the recorder is asked also about a rank that moves
STACKS_SIGNAL = signal.SIGUSR2  # a rank with a record answers it with the stacks of its threads

_dumps: dict[int, IO[str]] = {}  # by rank; open for as long as the process may get the signal


class Flights(Protocol):
    """Collectives of this process."""

    def collectives(self) -> tuple[Collective | None, tuple[Collective, ...]]:
        """Return (the oldest collective that has not ended, the last one of each group)."""
        ...

    def last(self) -> Collective | None:
        """Return the collective that was called last."""
        ...


@dataclass(frozen=True)
class RankFacts:
    """Facts of a rank that stay the same through its life."""

    run_dir: Path
    rank: int
    world_size: int
    generation: int
    timeout_s: float
    launched: bool  # by a launcher of this package, which looks for the cause when ranks fail

    @property
    def interval_s(self) -> float:
        """Return the seconds between beats, several of which fit into a deadline."""
        return min(LONGEST_INTERVAL_S, max(SHORTEST_INTERVAL_S, self.timeout_s / INTERVALS_PER_DEADLINE))


class Heartbeat:
    """Record of this rank, written by a daemon thread from `start` on.

    An error of the file system is no error of the run: the record is then old, or missing.
    """

    def __init__(self, facts: RankFacts, flights: Flights, *, device_bytes: Callable[[], int] = lambda: 0) -> None:
        """device_bytes: memory that tensors hold on the device."""
        self.facts = facts
        self._flights = flights
        self._device_bytes = device_bytes
        self._main = MainThread()
        self._tail = _Tail()
        self._host, self._started = socket.gethostname(), start_time(os.getpid())
        self._requests: queue.SimpleQueue[threading.Event | None] = queue.SimpleQueue()  # of beats; None: the last one
        self._lock = threading.Lock()  # of `_last`; never held while a file is written
        self._collectives: tuple[Collective, ...] = ()
        self._beats = 0
        self._made_folder = not facts.run_dir.exists()
        self._withdrawn = False
        self._last: RankRecord | None = None
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    @property
    def ended(self) -> LastWords | None:
        """Return the last words, None before them."""
        return None if self._last is None else self._last.ended

    def start(self) -> None:
        """Write the first record, and further ones on a thread of its own."""
        logging.getLogger().addHandler(self._tail)
        with suppress(OSError, ValueError):
            _answer_with_stacks(self.facts.run_dir, self.facts.rank)
        self.beat()
        self._thread.start()

    def stop(self) -> None:
        """Stop writing."""
        self._requests.put(None)
        self._thread.join(WRITE_S)
        logging.getLogger().removeHandler(self._tail)
        if self._withdrawn:
            self._remove()

    def end(self, kind: str, message: str, *, error: BaseException | None = None) -> LastWords:
        """Write the last words, kind being one of `records.ENDS`; the first ones stay. error: that ended the rank."""
        with self._lock:
            if self._last is None or self._last.ended is None:
                record = self._record(error)
                failed = (record.waiting or self._flights.last()) if kind in ("timeout", "lost peer") else None
                words = LastWords(kind, message, record.step, record.phase, failed)
                self._last = replace(record, waiting=None, ended=words)
            ended = self._last.ended
        self._beat_on_thread()
        assert ended is not None
        return ended

    def withdraw(self) -> None:
        """Let `stop` remove what this rank has written, and folders that it has made: of a run that never began."""
        self._withdrawn = True

    def _remove(self) -> None:
        folder, rank = health_folder(self.facts.run_dir), self.facts.rank
        for path in (record_path(self.facts.run_dir, rank), dump_path(self.facts.run_dir, rank)):
            with suppress(OSError):
                path.unlink()
        with suppress(OSError):  # other ranks' files may still be there, or the run's own
            folder.rmdir()
            if self._made_folder:
                folder.parent.rmdir()

    def beat(self) -> None:
        """Write the record now; from `start` on, for the thread alone."""
        with self._lock:
            ended = self._last is not None and self._last.ended is not None
            record = self._last = replace(self._last, beat=time.time()) if ended and self._last else self._record()
        try:
            write_record(self.facts.run_dir, record)
        except OSError as error:
            log.debug("the record of rank %d cannot be written: %s", self.facts.rank, error)

    def _beat_on_thread(self) -> None:
        """Let the thread write the record, and wait for it as long as a file system that works may take."""
        if not self._thread.is_alive():
            self.beat()
            return
        written = threading.Event()
        self._requests.put(written)
        if not written.wait(WRITE_S):
            log.warning(
                "the last words of rank %d are not written after %g s: does the file system of %s hang?",
                self.facts.rank,
                WRITE_S,
                self.facts.run_dir,
            )

    def _run(self) -> None:
        seen, due = _moment(), 0.0  # a new phase is recorded soon
        look_s = min(self.facts.interval_s, max(SHORTEST_INTERVAL_S, self.facts.world_size / RANKS_OF_A_FOLDER))
        while True:
            try:
                request = self._requests.get(timeout=look_s)
            except queue.Empty:
                before, seen = seen, _moment()
                if seen != before or time.monotonic() >= due:
                    due = time.monotonic() + self.facts.interval_s
                    self.beat()
                continue
            if request is None:
                return
            try:
                self.beat()
            finally:
                request.set()

    def _record(self, error: BaseException | None = None) -> RankRecord:
        """Return the state of the rank: now, or where `error` was raised."""
        place = self._main.look() if error is None else place_of_error(error)
        waiting = None
        # A look at the recorder takes milliseconds; a rank that has moved since the last beat does not need it.
        if self._beats % LOOKS == 0 or place is None or place.seconds > 0 or error is not None:
            waiting, self._collectives = self._flights.collectives()
        self._beats += 1
        phases = progress.active() if error is None else progress.active_at(error)
        steps = next((phase for phase in phases if phase.rounds), None)
        return RankRecord(
            rank=self.facts.rank,
            world_size=self.facts.world_size,
            generation=self.facts.generation,
            pid=os.getpid(),
            started=self._started,
            host=self._host,
            beat=time.time(),
            interval_s=self.facts.interval_s,
            timeout_s=self.facts.timeout_s,
            step=None if steps is None else int(steps.done),
            phases=tuple(
                PhaseRecord(one.name, one.elapsed_s, one.deadline_s, one.note) for one in phases if not one.rounds
            ),
            place=place,
            waiting=waiting,
            collectives=self._collectives,
            memory={"resident": resident_bytes(os.getpid()), "device": self._device_bytes()},
            log=tuple(self._tail.lines),
        )


def _moment() -> list[tuple[str, float]]:
    """Return the phases in progress, and of rounds how many are done."""
    return [(phase.name, phase.done if phase.rounds else 0.0) for phase in progress.active()]


@contextmanager
def beating(facts: RankFacts, flights: Flights, *, device_bytes: Callable[[], int] = lambda: 0) -> Iterator[Heartbeat]:
    """Keep the record of this rank inside; the last words are "done" unless others were said before."""
    heartbeat = Heartbeat(facts, flights, device_bytes=device_bytes)
    heartbeat.start()
    try:
        yield heartbeat
        heartbeat.end("done", "")
    finally:
        heartbeat.stop()


def dump_path(run_dir: Path, rank: int) -> Path:
    """Return the file into which a rank writes its stacks when it gets `STACKS_SIGNAL`."""
    return health_folder(run_dir) / f"dump_{rank:05d}.txt"


def _answer_with_stacks(run_dir: Path, rank: int) -> None:
    """Let faulthandler answer the signal, also while C code holds the interpreter's lock. Raises OSError."""
    path = dump_path(run_dir, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    file = open(os.open(path, flags, 0o644), "w")  # noqa: SIM115 - open until the process ends
    faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)
    before, _dumps[rank] = _dumps.get(rank), file
    if before is not None:
        before.close()


class _Tail(logging.Handler):
    """Last lines of this process's log."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: deque[str] = deque(maxlen=MAX_LOG_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the record's message."""
        try:
            message = " ".join(record.getMessage().split())[: MAX_TEXT // 2]
            self.lines.append(f"{time.strftime('%H:%M:%S', time.localtime(record.created))} {message}")
        except (TypeError, ValueError):  # arguments that do not go with the text
            return
