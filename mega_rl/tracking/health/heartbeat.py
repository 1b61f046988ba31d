"""Heartbeat of a rank: a thread that writes its record every few seconds."""

from __future__ import annotations

import ctypes
import logging
import math
import os
import queue
import signal
import socket
import sys
import sysconfig
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType, FrameType
from typing import TypeAlias

import psutil

import mega_rl
from mega_rl.errors import HungError
from mega_rl.tracking import progress
from mega_rl.tracking.health.records import (
    INNOCENT_CODES,
    MAX_LOG_LINES,
    MAX_TEXT,
    SAVE_S,
    Collective,
    LastWords,
    PhaseRecord,
    Place,
    RankRecord,
    health_folder,
    record_path,
    state_and_start,
    write_record,
)

log = logging.getLogger(__name__)

LONGEST_INTERVAL_S = 5.0
SHORTEST_INTERVAL_S = 0.2
INTERVALS_PER_DEADLINE = 10
RANKS_OF_A_FOLDER = 200  # ranks that may write a record in one second
WRITE_S = 2 * LONGEST_INTERVAL_S  # longest wait of a rank's end for a file system that hangs
LOOKS = 6  # beats between two looks at the flight recorder of a rank that moves
MAX_FRAMES = 200
PR_SET_PTRACER = 0x59616D61

_PACKAGE = os.path.dirname(os.path.abspath(mega_rl.__file__)) + os.sep
_LIBRARIES = tuple(
    {path + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib") if (path := sysconfig.get_path(name))}
)


# Returns (the oldest collective in flight, the last one called, the last one of each group) of this process.
Flights: TypeAlias = Callable[[], tuple[Collective | None, Collective | None, tuple[Collective, ...]]]


@dataclass(frozen=True)
class RankFacts:
    """Facts of a rank that stay the same through its life."""

    run_dir: Path
    rank: int
    world_size: int
    generation: int
    timeout_s: float
    launched: bool  # a launcher of this package started the rank and finds the cause of a failure

    @property
    def interval_s(self) -> float:
        """Return the seconds between beats, a fraction of the deadline."""
        return min(LONGEST_INTERVAL_S, max(SHORTEST_INTERVAL_S, self.timeout_s / INTERVALS_PER_DEADLINE))


class Heartbeat:
    """Record of this rank, written by a daemon thread inside the context.

    Errors of the file system do not end the run; the record is then old or missing.
    """

    def __init__(self, facts: RankFacts, flights: Flights, *, device_bytes: Callable[[], int] = lambda: 0) -> None:
        """device_bytes: returns the memory that tensors hold on the device."""
        self.facts = facts
        self._flights = flights
        self._device_bytes = device_bytes
        self._main = MainThread()
        self._tail = _Tail()
        self._host, self._started = socket.gethostname(), state_and_start(os.getpid())[1]
        self._requests: queue.SimpleQueue[threading.Event | None] = queue.SimpleQueue()  # beats to write; None: stop
        self._lock = threading.Lock()  # guards `_last`; not held while a file is written
        self._collectives: tuple[Collective, ...] = ()
        self._beats = 0
        self._parent, self._orphan_since = os.getppid(), math.inf
        self._made_folder = not facts.run_dir.exists()
        self._withdrawn = False
        self._last: RankRecord | None = None
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    @property
    def ended(self) -> LastWords | None:
        """Return the last words; None before them."""
        return None if self._last is None else self._last.ended

    def __enter__(self) -> Heartbeat:
        """Write the first record, and further ones in a thread."""
        logging.getLogger().addHandler(self._tail)
        # Lets this process's parent, and its other children, read its stacks where the kernel (Yama) restricts it.
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PTRACER, os.getppid(), 0, 0, 0)
        self.beat()
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Stop writing. Without an error or earlier last words, they are "done"."""
        if error is None:
            self.end("done", "")
        self._requests.put(None)
        self._thread.join(WRITE_S)
        logging.getLogger().removeHandler(self._tail)
        if self._withdrawn:
            folder = health_folder(self.facts.run_dir)
            with suppress(OSError):
                record_path(self.facts.run_dir, self.facts.rank).unlink()
            with suppress(OSError):  # not empty: files of other ranks, or of the run
                folder.rmdir()
                if self._made_folder:
                    folder.parent.rmdir()

    def end(self, kind: str, message: str, *, error: BaseException | None = None) -> LastWords:
        """Write the last words and return them; later ones do not replace the first."""
        with self._lock:
            if self._last is None or self._last.ended is None:
                record = self._record(error)
                failed = (record.waiting or self._flights()[1]) if kind in INNOCENT_CODES else None
                words = LastWords(kind, message, record.step, record.phase, failed)
                self._last = replace(record, waiting=None, ended=words)
            ended = self._last.ended
        assert ended is not None
        if not self._thread.is_alive():
            self.beat()
            return ended
        written = threading.Event()
        self._requests.put(written)
        if not written.wait(WRITE_S):
            log.warning(
                "the last words of rank %d are not written after %g s: does the file system of %s hang?",
                *(self.facts.rank, WRITE_S, self.facts.run_dir),
            )
        return ended

    def withdraw(self) -> None:
        """Remove the files and folders of this rank at the exit: the run never began."""
        self._withdrawn = True

    def beat(self) -> None:
        """Write the record now; inside the context only the thread calls it."""
        with self._lock:
            ended = self._last is not None and self._last.ended is not None
            record = self._last = replace(self._last, beat=time.time()) if ended and self._last else self._record()
        try:
            write_record(self.facts.run_dir, record)
        except OSError as error:
            log.debug("the record of rank %d cannot be written: %s", self.facts.rank, error)

    def _run(self) -> None:
        seen, due = _moment(), 0.0
        look_s = min(self.facts.interval_s, max(SHORTEST_INTERVAL_S, self.facts.world_size / RANKS_OF_A_FOLDER))
        while True:
            self._end_orphan()
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

    def _end_orphan(self) -> None:
        """Kill this rank if it lives SAVE_S after its launcher was killed."""
        if self.facts.launched and os.getppid() != self._parent:
            self._orphan_since = min(self._orphan_since, time.monotonic())
        if time.monotonic() > self._orphan_since + SAVE_S:
            os.kill(os.getpid(), signal.SIGKILL)

    def _record(self, error: BaseException | None = None) -> RankRecord:
        """Return the state of the rank now, or where `error` was raised."""
        place = self._main.look() if error is None else place_of_error(error)
        waiting = None
        # A look at the recorder takes milliseconds; skip it while the rank moves.
        if self._beats % LOOKS == 0 or place is None or place.seconds > 0 or error is not None:
            waiting, _, self._collectives = self._flights()
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
            memory={"resident": psutil.Process().memory_info().rss, "device": self._device_bytes()},
            log=tuple(self._tail.lines),
        )


def _moment() -> list[tuple[str, float]]:
    """Return the phases in progress, and the number of rounds done."""
    return [(phase.name, phase.done if phase.rounds else 0.0) for phase in progress.active()]


class _Tail(logging.Handler):
    """Handler that keeps the last lines of this process's log."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: deque[str] = deque(maxlen=MAX_LOG_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the record's message."""
        try:
            message = " ".join(record.getMessage().split())[: MAX_TEXT // 2]
            self.lines.append(f"{time.strftime('%H:%M:%S', time.localtime(record.created))} {message}")
        except (TypeError, ValueError):  # arguments that do not fit the text
            return


class MainThread:
    """Observer of the main thread: its line, and for how long it was seen there."""

    def __init__(self) -> None:
        self._ident = threading.main_thread().ident or 0
        self._key: tuple[int, CodeType, int] | None = None
        self._since = time.monotonic()

    def look(self) -> Place | None:
        """Return the place now; `seconds` is 0 unless the last look saw the same call."""
        frame = sys._current_frames().get(self._ident)
        if frame is None:
            return None
        key, now = (id(frame), frame.f_code, frame.f_lasti), time.monotonic()
        if key != self._key:
            self._key, self._since = key, now
        return place_of(frame, seconds=now - self._since)


def place_of(frame: FrameType, *, seconds: float = 0.0) -> Place:
    """Return the innermost line of the user's code, else of this package, else the frame's."""
    users: list[FrameType] = []
    package: FrameType | None = None
    current: FrameType | None = frame
    for _ in range(MAX_FRAMES):
        if current is None or package is not None:
            break
        name = current.f_code.co_filename
        if name.startswith(_PACKAGE):
            package = current
        elif not (name.startswith(("<", *_LIBRARIES)) or "site-packages" in name or "dist-packages" in name):
            users.append(current)
        current = current.f_back
    if package is not None and users:
        shown, function = users[0], users[-1].f_code.co_name
    else:
        shown, function = package or frame, ""
    return Place(shown.f_code.co_name, shown.f_code.co_filename, shown.f_lineno or 0, users=function, seconds=seconds)


def place_of_error(error: BaseException) -> Place | None:
    """Return the line where an error was raised; None if it was not raised."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if len(frames) > 1 and isinstance(error, HungError):
        frames.pop()  # the handler of the interrupt
    return place_of(frames[-1]) if frames else None
