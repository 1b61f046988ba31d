"""Blocks of prompts of a stream: read in the background, each in a random order of its own.

An epoch goes through all shards once, in a random order. The rows of its shards, one after the other, are cut into
blocks, and the prompts of a block are shuffled. Both orders are functions of the seed, so that a block depends on where
it begins and on nothing else: a position is all that a resumed run needs.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

from mega_rl.data.ordering import STREAM, permutation
from mega_rl.data.prompts import PromptReading
from mega_rl.data.rows import with_short_floats
from mega_rl.data.stream.shards import StreamShard
from mega_rl.errors import RunError, UserError
from mega_rl.types import Prompt

POLL_S = 0.5  # between looks at whether the reader is alive


class Position(NamedTuple):
    """Place in a stream where a block begins."""

    epoch: int = 0
    shard: int = 0  # place in the epoch's order of shards
    row: int = 0  # of the shard
    rows: int = 0  # of the epoch, in the blocks before
    block: int = 0  # since the run began
    first: int = 0  # draw of the block's first prompt


class PromptBlock(NamedTuple):
    """Prompts of consecutive rows, in the order in which they are drawn."""

    prompts: list[Prompt]
    begin: Position
    after: Position  # of the next block


class _StreamRow(NamedTuple):
    """A row of an epoch, and where the next one stands."""

    where: str
    content: object
    shard: int
    next_row: int


@dataclass(frozen=True)
class StreamPlan:
    """Order of a stream."""

    block_rows: int
    shuffle: bool
    seed: int
    key: Sequence[int] = ()  # further whole numbers that keep streams of one seed apart


@dataclass(frozen=True)
class StreamReader:
    """Blocks of a stream from any position on."""

    name: str  # setting that names the stream
    shards: Sequence[StreamShard]
    reading: PromptReading
    plan: StreamPlan
    source: str = ""  # of a mixture; "": prompts keep the one of their row
    check: Callable[[Sequence[Prompt]], None] | None = None  # gets one block; raises UserError for unusable rows

    def first_block(self) -> list[Prompt]:
        """Return the prompts of the first block in the order of their draws. Raises UserError as `blocks` does."""
        return next(self.blocks(Position())).prompts

    def blocks(self, at: Position) -> Iterator[PromptBlock]:
        """Yield block after block, epoch after epoch, without an end.

        Raises UserErrors for rows that cannot be used, UserError for files, and for an epoch without a usable prompt.
        """
        at_begin, usable = at.rows == 0, 0
        while True:
            rows = self._epoch(at)
            while chunk := list(islice(rows, self.plan.block_rows)):
                block = self._block(chunk, at)
                usable += len(block.prompts)
                at = block.after
                yield block
            if at_begin and not usable:
                raise UserError(f"{self.name}: no usable prompt is left of {at.rows} rows")
            at = Position(at.epoch + 1, block=at.block, first=at.first)
            at_begin, usable = True, 0

    def _block(self, chunk: Sequence[_StreamRow], at: Position) -> PromptBlock:
        fatal: list[str] = []
        rows = ((row.where, row.content) for row in chunk)
        prompts, _ = self.reading.prompts(rows, fatal, first=at.rows)
        if self.source:
            prompts = [replace(prompt, source=self.source) for prompt in prompts]
        if self.check is not None:
            self.check(prompts)
        if self.plan.shuffle:
            order = permutation(len(prompts), key=(self.plan.seed, STREAM, 1, at.block, *self.plan.key))
            prompts = [prompts[place] for place in order]
        last = chunk[-1]
        after = Position(
            at.epoch, last.shard, last.next_row, at.rows + len(chunk), at.block + 1, at.first + len(prompts)
        )
        return PromptBlock(prompts, at, after)

    def _epoch(self, at: Position) -> Iterator[_StreamRow]:
        """Yield the rows of an epoch from a position on."""
        order = list(range(len(self.shards)))
        if self.plan.shuffle:
            order = permutation(len(self.shards), key=(self.plan.seed, STREAM, 0, at.epoch, *self.plan.key))
        for place in range(at.shard, len(order)):
            skip = at.row if place == at.shard else 0
            shard, columns = self.shards[order[place]], self.reading.columns
            schema = getattr(shard, "schema", None)  # of rows of the Hub, whose floats are as wide as Python's
            for number, (where, content) in enumerate(shard.rows(columns, skip=skip), start=skip + 1):
                if schema is not None and isinstance(content, dict):
                    content = with_short_floats(content, columns.answer, schema)
                yield _StreamRow(where, content, place, number)


class BlocksAhead:
    """Blocks from a position on, of which a thread reads the next one while one is drawn from."""

    def __init__(self, reader: StreamReader, at: Position, *, timeout_s: float) -> None:
        self._reader, self._timeout_s = reader, timeout_s
        self._last = at
        self._ready: queue.Queue[PromptBlock | Exception] = queue.Queue(maxsize=1)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(at,), name="stream", daemon=True)
        self._thread.start()

    def next(self) -> PromptBlock:
        """Return the next block. Raises the reader's error, and RunError for a stream that gives none in time."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            is_alive = self._thread.is_alive()  # asked for before the queue, which its last block may be in
            try:
                block = self._ready.get(timeout=min(POLL_S, max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                self._check(is_alive, late=time.monotonic() >= deadline)
                continue
            if isinstance(block, Exception):
                raise block
            self._last = block.after
            return block

    def _check(self, is_alive: bool, *, late: bool) -> None:
        """Raise RunError where no block will come, or none has come in time."""
        last, place = self._last, f"shard {self._last.shard + 1} of {len(self._reader.shards)}"
        read = f"after {last.rows:,} rows of epoch {last.epoch}, in {place}"
        if not is_alive:
            raise RunError(f"{self._reader.name}: the reader of the stream has failed {read}; its traceback is above")
        if late:
            raise RunError(
                f"{self._reader.name}: the stream has given no block for data.stream.timeout_s={self._timeout_s:g} s, "
                f"{read}; the same command goes on from the last checkpoint"
            )

    def close(self) -> None:
        """Let the thread end; it may still wait for a read."""
        self._closed.set()

    def _read(self, at: Position) -> None:
        try:
            for block in self._reader.blocks(at):
                if not self._put(block):
                    return
        except (UserError, RunError) as error:  # raised where the block is needed
            self._put(error)

    def _put(self, item: PromptBlock | Exception) -> bool:
        """Return whether someone still waits for what was put."""
        while not self._closed.is_set():
            try:
                self._ready.put(item, timeout=0.5)
            except queue.Full:
                continue
            return True
        return False
