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
    heard, _ = failures(message, ranks, most=1)
    return heard[0] if heard else None


def failures(message: str | None, ranks: Ranks, *, most: int) -> tuple[list[str], int]:
    """(messages of the first `most` ranks that have one, number of ranks that do), the same on all; collective."""
    own = b"" if message is None else message.encode(errors="backslashreplace") or b"?"
    sizes = torch.zeros(ranks.size, dtype=torch.int64)
    sizes[ranks.rank] = len(own)
    sizes = ranks.sum(sizes)
    failing = [int(rank) for rank in sizes.nonzero().flatten().tolist()]
    heard = []
    for rank in failing[:most]:
        sent = torch.tensor(list(own) if rank == ranks.rank else [0] * int(sizes[rank]), dtype=torch.uint8)
        heard.append(bytes(ranks.broadcast(sent, source=rank).tolist()).decode(errors="replace"))
    return heard, len(failing)
