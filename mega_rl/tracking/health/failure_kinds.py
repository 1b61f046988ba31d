"""Classify the errors of a rank: its own, or caused by another rank."""

from __future__ import annotations

import os
from collections.abc import Mapping

from mega_rl.errors import HungError, StalledError

GENERATION = "MEGA_RL_GENERATION"  # environment variable of ranks that a launcher of this package has started
# Exit codes of ranks that a launcher has started and that did nothing wrong: the connection to another rank broke
# (EX_TEMPFAIL of sysexits.h), or another rank did not come to a collective in time. The launcher names the cause.
LOST_PEER_CODE, TIMEOUT_CODE = 75, 76
INNOCENT_CODES: Mapping[str, int] = {"lost peer": LOST_PEER_CODE, "timeout": TIMEOUT_CODE}  # kind of failure: exit code
UNSAID = 256  # added to the exit code of a rank whose command did not report that it ends with that code
LOST_CONNECTION = "lost the connection to another rank, which has ended; what that rank said, if anything, is the cause"
# Messages of ranks that another rank has ended, outside of a run, whose guard names phase and collective.
BY_OTHERS = {
    LOST_PEER_CODE: LOST_CONNECTION,
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
