"""What all ranks must know before any of them goes on."""

from __future__ import annotations

import json
from typing import Any

import torch

from mega_rl.protocols import Ranks


def told(value: Any, ranks: Ranks) -> Any:
    """What rank 0 gives, sent as JSON; the other ranks' `value` is ignored; collective."""
    text = json.dumps(value).encode() if ranks.rank == 0 else b""
    size = int(ranks.broadcast(torch.tensor(len(text))))
    buffer = torch.zeros(size, dtype=torch.uint8)
    if ranks.rank == 0:
        buffer = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return json.loads(bytes(ranks.broadcast(buffer).tolist()))


def first_failure(message: str | None, ranks: Ranks) -> str | None:
    """The message of the first rank that has one, the same on all; None where no rank has failed; collective."""
    own = b"" if message is None else message.encode(errors="backslashreplace") or b"?"
    sizes = torch.zeros(ranks.size, dtype=torch.int64)
    sizes[ranks.rank] = len(own)
    sizes = ranks.sum(sizes)
    if not sizes.any():
        return None
    first = int(sizes.nonzero()[0])
    sent = torch.tensor(list(own) if ranks.rank == first else [0] * int(sizes[first]), dtype=torch.uint8)
    return bytes(ranks.broadcast(sent, source=first).tolist()).decode(errors="replace")
