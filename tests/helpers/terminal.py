"""A command on a terminal of its own: what it writes, and when."""

from __future__ import annotations

import fcntl
import itertools
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

CONTROL = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]|\r")
TOKENS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+")
END_S = 5.0  # that a process gets after its terminal has gone


@dataclass
class Recording:
    """Recording of a command's output to its terminal."""

    began: float = field(default_factory=time.monotonic)
    chunks: list[tuple[float, bytes]] = field(default_factory=list)  # seconds since the start, bytes
    ended_s: float = 0.0
    exit_code: int | None = None  # None: it was ended at the deadline

    @property
    def output(self) -> str:
        """Return the whole output, escape sequences included."""
        return b"".join(data for _, data in self.chunks).decode(errors="replace")

    @property
    def text(self) -> str:
        """Return the output without escape sequences."""
        return CONTROL.sub(b"", b"".join(data for _, data in self.chunks)).decode(errors="replace")

    @property
    def first_s(self) -> float:
        """Return the seconds until the first visible character."""
        return next((at for at, data in self.chunks if CONTROL.sub(b"", data).strip()), self.ended_s)

    def silences(self) -> list[tuple[float, float]]:
        """Return (seconds, when it began) of each time without output, the longest first; the live line is output."""
        times = [0.0, *(at for at, _ in self.chunks), self.ended_s]
        return sorted(((after - before, before) for before, after in itertools.pairwise(times)), reverse=True)

    def screen(self) -> str:
        """Return what is left on the terminal, its lines unfolded."""
        lines, row, column = [""], 0, 0
        for token in TOKENS.findall(self.output):
            if token == "\n":
                row += 1
                lines += [""] * (row == len(lines))
            elif token == "\r":
                column = 0
            elif token.startswith("\x1b"):
                if token.endswith("A"):
                    row = max(row - int(token[2:-1] or 1), 0)
                elif token.endswith("K"):
                    lines[row] = "" if token == "\x1b[2K" else lines[row][:column]
            else:
                lines[row] = lines[row][:column].ljust(column) + token + lines[row][column + len(token) :]
                column += len(token)
        return "\n".join(lines)


def record(command: Sequence[str], *, columns: int, timeout_s: float) -> Recording:
    """Run a command under a terminal of so many columns and record it; at the deadline it is ended."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    recording = Recording()
    process = subprocess.Popen(
        list(command),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**os.environ, "TERM": "xterm-256color"},
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(slave)
    try:
        while time.monotonic() - recording.began < timeout_s:
            ready, _, _ = select.select([master], [], [], 0.05)
            try:
                data = os.read(master, 1 << 16) if ready else b""
            except OSError:  # nobody has the terminal open any more
                break
            if data:
                recording.chunks.append((time.monotonic() - recording.began, data))
            elif process.poll() is not None:
                break
        else:
            process.send_signal(signal.SIGTERM)
        recording.ended_s = time.monotonic() - recording.began
        in_time = recording.ended_s < timeout_s
        code = process.wait(END_S)
        recording.exit_code = code if in_time else None
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    finally:
        os.close(master)
    return recording
