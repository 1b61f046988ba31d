"""Place of a thread: the line that it is at, and the user's function that it is inside of."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import time
import traceback
from types import CodeType, FrameType

import mega_rl
from mega_rl.errors import HungError
from mega_rl.health.records import Place

MAX_FRAMES = 200
_PACKAGE = os.path.dirname(os.path.abspath(mega_rl.__file__)) + os.sep
_LIBRARIES = tuple(
    {path + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib") if (path := sysconfig.get_path(name))}
)


class MainThread:
    """Eye on the main thread: its line, and for how long it was seen there."""

    def __init__(self) -> None:
        self._ident = threading.main_thread().ident or 0
        self._key: tuple[int, CodeType, int] | None = None
        self._since = time.monotonic()

    def look(self) -> Place | None:
        """Return the place now; `seconds` is 0 unless the last look saw the very same call."""
        frame = sys._current_frames().get(self._ident)
        if frame is None:
            return None
        key, now = (id(frame), frame.f_code, frame.f_lasti), time.monotonic()
        if key != self._key:
            self._key, self._since = key, now
        return place_of(frame, seconds=now - self._since)


def place_of(frame: FrameType, *, seconds: float = 0.0) -> Place:
    """Return the line of a frame: that of the innermost user's code it runs for, else of the package, else its own."""
    users: list[FrameType] = []
    package: FrameType | None = None
    current: FrameType | None = frame
    for _ in range(MAX_FRAMES):
        if current is None or package is not None:
            break
        name = current.f_code.co_filename
        if name.startswith(_PACKAGE):
            package = current
        elif is_users(name):
            users.append(current)
        current = current.f_back
    if package is not None and users:
        shown, function = users[0], users[-1].f_code.co_name
    else:
        shown, function = package or frame, ""
    return Place(shown.f_code.co_name, shown.f_code.co_filename, shown.f_lineno or 0, users=function, seconds=seconds)


def place_of_error(error: BaseException) -> Place | None:
    """Return the line where an error was raised; None of one that was not."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if len(frames) > 1 and isinstance(error, HungError):
        frames.pop()  # the handler of the interrupt
    return place_of(frames[-1]) if frames else None


def is_users(file: str) -> bool:
    """Return whether a file of code belongs to the user: not to this package, Python, or an installed library."""
    return not (file.startswith(("<", _PACKAGE, *_LIBRARIES)) or "site-packages" in file or "dist-packages" in file)
