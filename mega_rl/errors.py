"""Errors that end a run with one message and no traceback, and their shared wording."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

# Descriptor of a file into which the command of each rank writes, at the rank's place, one more than its exit code: a
# reward function or a library may call os._exit(0).
LAST_WORD = "MEGA_RL_LAST_WORD"


class UserError(ValueError):
    """User's mistake: one message with value, rule and fix; exit code 2, no traceback."""

    exit_code = 2


class RunError(RuntimeError):
    """A run cannot continue: one message and exit code 1, the same on all ranks."""

    exit_code = 1


class PeerError(RunError):
    """Failure caused by another rank that is gone or came too late to a collective."""


class StalledError(PeerError):
    """Another rank makes no progress; raised on the ranks that wait for it."""


class HungError(RunError):
    """Work of this rank that was interrupted because it made no progress for too long."""


class NonFiniteGradientError(RunError):
    """A gradient norm that is NaN or infinite; weights, moments and step counts are unchanged."""

    def __init__(self, message: str, *, norm: float, metrics: Mapping[str, float]) -> None:
        """metrics: of the update whose optimizer step was not made, equal on all ranks."""
        super().__init__(message)
        self.norm = norm
        self.metrics = dict(metrics)


class UserErrors(UserError):
    """Several mistakes, shown together, one line each."""

    def __init__(self, problems: Sequence[str]) -> None:
        assert problems, "UserErrors needs at least one problem"
        self.problems = tuple(problems)
        super().__init__("\n".join(problems))


def no_such(thing: str, path: Path) -> str:
    """Return "no such file" or the like, with the place that a relative path stands for."""
    return f"no such {thing}" + ("" if path.is_absolute() else f" (looked for {path.absolute()})")


def in_units(nbytes: int) -> str:
    """Return a number of bytes as people read it: "1.50 GB", "3.20 MB", "12 bytes"."""
    for size, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "KB")):
        if nbytes >= size:
            return f"{nbytes / size:,.2f} {unit}"
    return f"{nbytes} bytes"


def name_of_signal(number: int) -> str:
    """Return "SIGKILL" of 9, and "signal 70" of a number without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
