"""Errors of a rank whose cause is another rank: its end, or its absence from a collective."""

from __future__ import annotations

import os

from mega_rl.launcher.outcome import LOST_PEER, WAITED_IN_VAIN
from mega_rl.launcher.ranks import GENERATION

# How gloo ends a collective, and NCCL's ncclRemoteError. torch.distributed has one type for all of gloo's errors.
_PEER_IS_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused")
_REMOTE_ERROR = "remote process exited or there was a network error"
_LATE = ("Timed out waiting", "timed out")
_OF_THE_STORE = ("DistNetworkError", "DistStoreError")


def has_launcher() -> bool:
    """Return whether a launcher of this package has started this rank, so that it says why the run has ended."""
    return GENERATION in os.environ


def innocence(error: BaseException) -> int | None:
    """Return the exit code, `LOST_PEER` or `WAITED_IN_VAIN`, of a rank that another one brought down; else None.

    The first error of a chain decides: those that come up while files and groups are closed are its effects.
    """
    while (before := error.__cause__ or (None if error.__suppress_context__ else error.__context__)) is not None:
        error = before
    text = str(error)
    if isinstance(error, RuntimeError) and "gloo" in text and any(words in text for words in _PEER_IS_GONE):
        return LOST_PEER
    if isinstance(error, RuntimeError) and "gloo" in text and any(words in text for words in _LATE):
        return WAITED_IN_VAIN
    if _REMOTE_ERROR in text or type(error).__name__ in _OF_THE_STORE:
        return LOST_PEER
    return None
