"""Distributed checkpoints that Megatron-Core's own code writes in a rank's own process, without others beside it.

Releases before 0.18 fork a process for each file, beside the threads of gloo, and wait without a deadline for its
answer: a writer that hangs or dies holds its rank up, and all others in their next collective. Later releases write
where they are called. What is written is the same, by the same function of upstream.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

FORKING = "write_preloaded_data_multiproc"  # of releases before 0.18


def write_in_ranks() -> None:
    """Have ranks that are forked from this process write their files themselves."""
    # Else the queue of results is a server, a process for each rank that saves, which imports all that the rank has.
    assert filesystem_async._results_queue is None
    filesystem_async._results_queue = queue.Queue()
    if hasattr(FileSystemWriterAsync, FORKING):
        setattr(FileSystemWriterAsync, FORKING, staticmethod(_write))


def _write(
    transforms: Sequence[Any], use_msc: bool, rank: int, buckets: Sequence[Any], results: queue.Queue[Any]
) -> None:
    """Write a file for each bucket and put the results by bucket, or the first error, as upstream's function does."""
    written: dict[int, list[Any]] = {}
    for number, bucket in enumerate(buckets):
        local, count = queue.Queue[tuple[int, Any]](), queue.Queue[int]()
        count.put(number)
        FileSystemWriterAsync.write_preloaded_data(transforms, number, bucket, local, count, use_fsync=False)
        _, result = local.get_nowait()
        if isinstance(result, Exception):
            results.put(result)
            return
        written[number] = result
    results.put(written)
