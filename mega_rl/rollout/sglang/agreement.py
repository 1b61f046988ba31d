"""How all ranks learn of what single ranks have seen: which servers failed, and why."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from mega_rl.protocols import Ranks
from mega_rl.rollout.sglang.calls import ServerError

Answer = TypeVar("Answer")

_MOST_THREADS = 32


def agreed(ranks: Ranks, failed: Mapping[int, str], *, num_servers: int) -> dict[int, str]:
    """Server -> why, of every server that failed on some rank, the same on all; collective.

    Where several ranks name a reason, the lowest rank's counts.
    """
    texts = [failed[i].encode() if i in failed else b"" for i in range(num_servers)]
    # Ranks count from the highest down, so that the maximum is the lowest rank that has something to say.
    mine = torch.tensor([ranks.size - ranks.rank if i in failed else 0 for i in range(num_servers)])
    longest = torch.tensor([max(map(len, texts), default=0)])
    found = ranks.max(torch.cat([mine, longest])).tolist()
    speaker, width = found[:num_servers], found[num_servers]
    if not any(speaker):
        return {}
    letters = torch.zeros(num_servers, width, dtype=torch.int32)
    for i, text in enumerate(texts):
        if speaker[i] and speaker[i] == int(mine[i]) and text:
            letters[i, : len(text)] = torch.tensor(list(text), dtype=torch.int32)
    rows = ranks.sum(letters).tolist()
    return {i: bytes(rows[i]).rstrip(b"\0").decode(errors="replace") for i in range(num_servers) if speaker[i]}


def each(servers: Collection[int], ask: Callable[[int], Answer]) -> tuple[dict[int, Answer], dict[int, str]]:
    """(answer of each server, why not of each that failed) of `ask`, all servers at once."""
    if not servers:
        return {}, {}

    def attempt(server: int) -> tuple[Answer | None, str | None]:
        try:
            return ask(server), None
        except ServerError as error:
            return None, str(error)

    with ThreadPoolExecutor(min(len(servers), _MOST_THREADS), thread_name_prefix="server") as pool:
        results = dict(zip(servers, pool.map(attempt, servers), strict=True))
    answers = {i: answer for i, (answer, why) in results.items() if why is None}
    return answers, {i: why for i, (_, why) in results.items() if why is not None}  # type: ignore[return-value]


def without(servers: Iterable[int], failed: Collection[int]) -> list[int]:
    """The servers that have not failed, in order."""
    return [i for i in servers if i not in failed]
