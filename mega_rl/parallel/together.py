"""Ending a run on all ranks for one reason."""

from __future__ import annotations

import torch

from mega_rl.errors import RunError
from mega_rl.protocols import Ranks


def raise_together(failure: Exception | None, everyone: Ranks, *, error: type[RunError]) -> None:
    """Raise on every rank if any rank has failed, else nothing; collective over `everyone`.

    A rank that has failed raises its own failure, the others an `error` with the first failed rank's message. Without
    it they would wait for the failed one until a collective's deadline.
    """
    message = list(str(failure).encode(errors="backslashreplace")) or [ord("?")] if failure else []
    sizes = torch.zeros(everyone.size, dtype=torch.int64)
    sizes[everyone.rank] = len(message)
    sizes = everyone.sum(sizes)
    if not sizes.any():
        return
    first = int(sizes.nonzero()[0])
    sent = torch.tensor(message if everyone.rank == first else [0] * int(sizes[first]), dtype=torch.uint8)
    text = bytes(everyone.broadcast(sent, source=first).tolist()).decode(errors="replace")
    raise failure or error(text)
