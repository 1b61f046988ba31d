"""Phases and log lines on standard error: one live line on a terminal, plain lines elsewhere.

The live area is a single line on purpose. Other ranks write to the same terminal from their own processes; they can
erase one line before they write, and rank 0 draws it again below within an eighth of a second.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from mega_rl.tracking.progress import Phase, close, listen, printable

REFRESHES_PER_SECOND = 8
REMINDER_S = 60.0  # without a live line, a log that is silent for this long names the work in progress
SPINNER, ASCII_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏", "-\\|/"
TIME_WIDTH = len("08:04:33 ")  # in front of each line of the log
ERASE_LINE = "\r\x1b[2K"
LOGGERS = ("", "mega_rl", "mega_rl.config")  # commands set the levels of these


@cache
def standard_error() -> Console:
    """Return the one console of standard error; a second console would tear the live line."""
    return _StandardError(stderr=True)


class _StandardError(Console):
    """A console that outlives its reader, such as `| head`."""

    def on_broken_pipe(self) -> None:
        """Send further output to /dev/null; rich would end the program."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


class Display:
    """Listener that draws a line while there are phases, log lines above it."""

    def __init__(self, console: Console | None = None, *, live: bool = True, shows: bool = True) -> None:
        """console: standard error unless given. live: draw the line. shows: show phases at all."""
        self.console = console or standard_error()
        self.restore: Callable[[], None] = lambda: None  # called by `close`
        self.written = time.monotonic()  # time of the last log line
        self._draws = live and self.console.is_terminal and not self.console.is_dumb_terminal
        self._phases: tuple[Phase, ...] = ()
        self._live: Live | None = None
        self._closed = threading.Event()
        self._shows, self._reminds = shows, False
        self._lock = threading.RLock()

    def changed(self, phases: tuple[Phase, ...]) -> None:
        """Draw the line while there are phases; without a terminal, start reminders."""
        with self._lock:
            self._phases = phases if self._shows else ()
            if self._draws and self._phases and self._live is None:
                self._live = Live(
                    get_renderable=self._line,
                    console=self.console,
                    refresh_per_second=REFRESHES_PER_SECOND,
                    transient=True,
                    redirect_stdout=sys.stdout.isatty(),
                )
                self._live.start(refresh=True)
                self.console.show_cursor(True)  # a rank that is killed would leave the terminal without a cursor
            elif not phases and self._live is not None:
                self._live.stop()
                self._live = None
            elif not self._draws and self._phases and not self._reminds:
                self._reminds = True
                threading.Thread(target=self._remind, name="progress reminder", daemon=True).start()

    def close(self) -> None:
        """Erase the live line, end reminders, and restore the process's own logging."""
        self.restore()
        self._closed.set()
        self.changed(())

    def write(self, line: str) -> None:
        """Write a line above the live one, not folded, so that a path can be copied."""
        self.written = time.monotonic()
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _line(self) -> Text:
        """Return the live line, cut to the terminal."""
        words = Text(live_line(self._phases, ascii_only=self.console.options.ascii_only), no_wrap=True)
        words.truncate(self.console.width - 1, overflow="ellipsis")  # the last column would wrap on some terminals
        return words

    def _remind(self) -> None:
        """Log the work in progress whenever the log was silent for REMINDER_S."""
        while not self._closed.wait(REMINDER_S / 12):
            phases = self._phases
            silent_since = max([self.written, *(phase.began for phase in phases[:1])])
            if phases and time.monotonic() - silent_since >= REMINDER_S:
                self.written = time.monotonic()
                without_spinner = live_line(phases, ascii_only=True)[2:]
                logging.getLogger(__name__).info("still %s", without_spinner)


def live_line(phases: tuple[Phase, ...], *, ascii_only: bool = False) -> str:
    """Return "- step 7/60 · generate 34/256 rows 0:03 · ~2:10 left", or ""."""
    if not phases:
        return ""
    frames = ASCII_SPINNER if ascii_only else SPINNER
    spinner = frames[int(phases[0].elapsed_s * REFRESHES_PER_SECOND) % len(frames)]
    repeated = [phase for phase in phases if phase.rounds]
    own = [phase for phase in phases if not phase.rounds and phase.thread == phases[0].thread]
    others = [phase for phase in phases if not phase.rounds and phase.thread != phases[0].thread]
    parts = [f"{phase.name} {min(phase.done + 1, phase.total or 0):.0f}/{phase.total:.0f}" for phase in repeated]
    parts += [_in_words(phase) for phase in own[-1:]] + [_in_words(phase, timed=False) for phase in others]
    parts += [left for phase in repeated[:1] if (left := _time_left(phase))]
    return f"{spinner} " + (" - " if ascii_only else " · ").join(parts)


def _in_words(phase: Phase, *, timed: bool = True) -> str:
    words = [phase.name]
    if phase.unit == "B":
        of_total = f"/{phase.total / 1e6:,.0f}" if phase.total else ""
        words.append(f"{phase.done / 1e6:,.0f}{of_total} MB")
    elif phase.total:
        words.append(f"{phase.done:,.0f}/{phase.total:,.0f} {phase.unit}".rstrip())
    words += [phase.note] * bool(phase.note) + [clock(phase.elapsed_s)] * timed
    if phase.deadline_s is not None:
        words.append(f"of at most {clock(phase.deadline_s)}")
    return " ".join(words)


def _time_left(phase: Phase) -> str:
    """Return the time left at the pace so far; empty in the first round."""
    done = phase.done - phase.first
    if done <= 0 or not phase.total or phase.done >= phase.total:
        return ""
    pace_s = (phase.advanced - phase.began) / done
    left_s = pace_s * (phase.total - phase.done) - (time.monotonic() - phase.advanced)
    return f"~{clock(max(left_s, 0.0))} left"


def clock(seconds: float) -> str:
    """Return seconds as "0:03", "12:34" or "1:02:03"."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class _Handler(logging.Handler):
    """Log records as lines that a function writes."""

    def __init__(self, write: Callable[[str], None]) -> None:
        super().__init__()
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record."""
        try:
            self._write(self.format(record))
        except Exception:  # noqa: BLE001 - logging's rule: a handler raises nothing
            self.handleError(record)


def _write_next_to_rank_0(line: str) -> None:
    """Write a line of another rank in the place of rank 0's live line."""
    start = ERASE_LINE if sys.stderr.isatty() else ""
    sys.stderr.write(f"{start}{line}\n")
    sys.stderr.flush()


class _Formatter(logging.Formatter):
    """Format "08:04:33 text"; warnings and errors with their level, ranks other than 0 with their number."""

    def __init__(self, rank: str) -> None:
        super().__init__(datefmt="%H:%M:%S")
        self._rank = "" if rank == "0" else f"rank {rank}: "

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Put time, level and rank before the message."""
        level = "" if record.levelno <= logging.INFO else f"{record.levelname} "
        return f"{self.formatTime(record, self.datefmt)} {level}{self._rank}{printable(record.message)}"

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, and an indented traceback, whose message cannot look like lines of the log."""
        line, *traceback = super().format(record).split("\n")
        return "\n".join([line, *(f"  {printable(entry)}" for entry in traceback)])


def show_progress(*, live: bool = True, beside_ranks: bool = False) -> None:
    """Log to standard error and, on rank 0, show phases there, until `progress.close`.

    Information comes only from rank 0, warnings of this package from every rank. Other packages' warnings and Python's
    are the same on all ranks and come from rank 0. live: whether a terminal gets a live line. beside_ranks: this is the
    launcher, on whose terminal rank 0 draws that line.
    """
    rank = os.environ.get("RANK", "0")
    close()
    display = Display(live=live, shows=rank == "0")
    handler = _Handler(display.write if rank == "0" and not beside_ranks else _write_next_to_rank_0)
    handler.setFormatter(_Formatter(rank))
    levels = {name: logging.getLogger(name).level for name in LOGGERS}
    formatwarning, warnings.formatwarning = warnings.formatwarning, _one_line
    logging.getLogger().addHandler(handler)
    logging.captureWarnings(True)

    def restore() -> None:
        logging.captureWarnings(False)
        warnings.formatwarning = formatwarning
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        logging.getLogger().removeHandler(handler)

    display.restore = restore
    listen(display)
    logging.getLogger().setLevel(logging.WARNING if rank == "0" else logging.ERROR)
    logging.getLogger("mega_rl").setLevel(logging.INFO if rank == "0" else logging.WARNING)


def _one_line(message: Any, category: type[Warning], filename: str, lineno: int, line: str | None = None) -> str:
    """Return a Python warning as one line, with the file and line that caused it."""
    return f"{category.__name__}: {' '.join(str(message).split())} ({os.path.basename(filename)}:{lineno})"
