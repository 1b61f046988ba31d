"""Bytes from rank to rank of a group, many at once, in buffers of a bounded size."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from mega_rl.errors import RunError, UserError
from mega_rl.parallel.comm import GroupRanks

PART_BYTES = 16 << 20
IN_FLIGHT = 4  # parts of a rank that are sent or received at a time


class FilePart(NamedTuple):
    """Bytes of a file that one rank sends to another."""

    source: int
    target: int
    file: str
    start: int
    nbytes: int


class _Posted(NamedTuple):
    part: FilePart
    buffer: torch.Tensor
    work: dist.Work | None


def cut(source: int, target: int, file: str, start: int, nbytes: int) -> list[FilePart]:
    """Return the parts of at most `PART_BYTES` that bytes of a file are sent in."""
    ends = range(start, start + nbytes, PART_BYTES)
    return [FilePart(source, target, file, at, min(PART_BYTES, start + nbytes - at)) for at in ends]


def transfer(
    parts: Sequence[FilePart],
    ranks: GroupRanks,
    *,
    read: Callable[[FilePart, memoryview], None],
    write: Callable[[FilePart, memoryview], None],
) -> str | None:
    """Send all parts; return this rank's first failure, None without one; collective.

    parts: the same on all ranks, each between two ranks. read: fills a buffer on the source; write: takes one on the
    target; both may raise RunError or UserError, and the rest still moves, so that no rank waits for one that has
    failed. The group's deadline is that of each part.
    """
    posted: deque[_Posted] = deque()
    failures: list[str] = []

    def guarded(work: Callable[[FilePart, memoryview], None], part: FilePart, buffer: torch.Tensor) -> None:
        try:
            work(part, buffer.numpy().data)
        except (RunError, UserError) as error:
            failures.append(str(error))

    def settle(oldest: _Posted) -> None:
        if oldest.work is not None:
            oldest.work.wait()
        if oldest.part.target == ranks.rank:
            guarded(write, oldest.part, oldest.buffer)

    # The first part of all that have not arrived is the oldest of both its ranks, so no rank waits for ever.
    for tag, part in enumerate(_in_turn(parts), start=1):
        if ranks.rank not in (part.source, part.target):
            continue
        buffer = torch.zeros(part.nbytes, dtype=torch.uint8)
        if part.source == ranks.rank:
            guarded(read, part, buffer)
            work = dist.isend(buffer, group=ranks.group, group_dst=part.target, tag=tag)
        else:
            work = dist.irecv(buffer, group=ranks.group, group_src=part.source, tag=tag)
        posted.append(_Posted(part, buffer, work))
        if len(posted) == IN_FLIGHT:
            settle(posted.popleft())
    while posted:
        settle(posted.popleft())
    return failures[0] if failures else None


def _in_turn(parts: Sequence[FilePart]) -> Iterator[FilePart]:
    """Yield the first part of every pair of ranks, then their second ones, and so on: all pairs work at once."""
    seen: Counter[tuple[int, int]] = Counter()
    numbered = []
    for part in parts:
        numbered.append((seen[part.source, part.target], part))
        seen[part.source, part.target] += 1
    for _, part in sorted(numbered, key=lambda each: each[0]):
        yield part
