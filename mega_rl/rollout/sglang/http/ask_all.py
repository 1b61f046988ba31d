"""Concurrent calls, one to each of several servers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from mega_rl.rollout.sglang.http.request import ServerError

Answer = TypeVar("Answer")

_MOST_THREADS = 32


def each(servers: Collection[int], ask: Callable[[int], Answer]) -> tuple[dict[int, Answer], dict[int, str]]:
    """Call `ask` for all servers at once; return the answers and the failures' reasons, both by server."""
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
    """Return the servers that have not failed, in order."""
    return [i for i in servers if i not in failed]
