"""Errors of a rank whose cause is another rank: its end, or its absence from a collective."""

from __future__ import annotations

import os

from mega_rl.health.endings import kind_of
from mega_rl.launcher.ranks import GENERATION, LOST_PEER, WAITED_IN_VAIN

LOST_CONNECTION = "lost the connection to another rank, which has ended; what that rank said, if anything, is the cause"
# Errors that another rank has caused, outside of a run, which names phase and collective (`mega_rl.health.guard`).
BY_OTHERS = {LOST_PEER: LOST_CONNECTION, WAITED_IN_VAIN: "waited in a collective for a rank that did not come in time"}


def has_launcher() -> bool:
    """Return whether a launcher of this package has started this rank, so that it says why the run has ended."""
    return GENERATION in os.environ


def innocence(error: BaseException) -> int | None:
    """Return the exit code, `LOST_PEER` or `WAITED_IN_VAIN`, of a rank that another one brought down; else None.

    The first error of a chain decides: those that come up while files and groups are closed are its effects.
    """
    while (before := error.__cause__ or (None if error.__suppress_context__ else error.__context__)) is not None:
        error = before
    return {"lost peer": LOST_PEER, "timeout": WAITED_IN_VAIN}.get(kind_of(error))
