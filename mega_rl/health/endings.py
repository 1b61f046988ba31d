"""Kinds of ends of a rank: errors of torch and its backends that say that a peer is late or gone, signals, others."""

from __future__ import annotations

from mega_rl.errors import HungError, StalledError

UNSAID = 256  # plus the exit code of a rank whose command has not said to its launcher that it ends with that code

# gloo's and NCCL's own words, and those of torch's store, which ranks meet at before they have groups.
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
WHOLE_TEXTS = ("Application timeout caused pair closure",)  # gloo's, of a wait on a pair that another one has closed
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


def kind_of(error: BaseException) -> str:
    """Return "lost peer" or "timeout" of an error that another rank has caused, "hung", "stopped", or "error"."""
    if not isinstance(error, Exception | SystemExit):
        return "stopped"
    if isinstance(error, StalledError | HungError):
        return "timeout" if isinstance(error, StalledError) else "hung"
    # torch.distributed's errors are RuntimeErrors; one of a user's code is his own.
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
