"""Blocks of prompts of a stream: read in the background, each in a random order of its own.

An epoch goes through all shards once, in a random order. The rows of its shards, one after the other, are cut into
blocks, and the prompts of a block are shuffled. Both orders are functions of the seed, so that a block depends on where
it begins and on nothing else: a position is all that a resumed run needs.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

from mega_rl.data.ordering import STREAM, permutation
from mega_rl.data.prompts import PromptReading
from mega_rl.data.stream.shards import Shard
from mega_rl.errors import RunError, UserError
from mega_rl.types import Prompt


class Position(NamedTuple):
    """Place in a stream where a block begins."""

    epoch: int = 0
    shard: int = 0  # place in the epoch's order of shards
    row: int = 0  # of the shard
    rows: int = 0  # of the epoch, in the blocks before
    block: int = 0  # since the run began
    first: int = 0  # draw of the block's first prompt


class Block(NamedTuple):
    """Prompts of consecutive rows, in the order in which they are drawn."""

    prompts: list[Prompt]
    begin: Position
    after: Position  # of the next block


class _Row(NamedTuple):
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
class BlockReader:
    """Blocks of a stream from any position on."""

    name: str  # setting that names the stream
    shards: Sequence[Shard]
    reading: PromptReading
    plan: StreamPlan
    source: str = ""  # of a mixture; "": prompts keep the one of their row

    def first_block(self) -> list[Prompt]:
        """Return the prompts of the first block in the order of their draws. Raises UserError as `blocks` does."""
        return next(self.blocks(Position())).prompts

    def blocks(self, at: Position) -> Iterator[Block]:
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

    def _block(self, chunk: Sequence[_Row], at: Position) -> Block:
        fatal: list[str] = []
        rows = ((row.where, row.content) for row in chunk)
        prompts, _ = self.reading.prompts(rows, fatal, first=at.rows)
        if self.source:
            prompts = [replace(prompt, source=self.source) for prompt in prompts]
        if self.plan.shuffle:
            order = permutation(len(prompts), key=(self.plan.seed, STREAM, 1, at.block, *self.plan.key))
            prompts = [prompts[place] for place in order]
        last = chunk[-1]
        after = Position(
            at.epoch, last.shard, last.next_row, at.rows + len(chunk), at.block + 1, at.first + len(prompts)
        )
        return Block(prompts, at, after)

    def _epoch(self, at: Position) -> Iterator[_Row]:
        """Yield the rows of an epoch from a position on."""
        order = list(range(len(self.shards)))
        if self.plan.shuffle:
            order = permutation(len(self.shards), key=(self.plan.seed, STREAM, 0, at.epoch, *self.plan.key))
        for place in range(at.shard, len(order)):
            skip = at.row if place == at.shard else 0
            rows = self.shards[order[place]].rows(self.reading.columns, skip=skip)
            for number, (where, content) in enumerate(rows, start=skip + 1):
                yield _Row(where, content, place, number)


class BlocksAhead:
    """Blocks from a position on, of which a thread reads the next one while one is drawn from."""

    def __init__(self, reader: BlockReader, at: Position, *, timeout_s: float) -> None:
        self._reader, self._timeout_s = reader, timeout_s
        self._last = at
        self._ready: queue.Queue[Block | BaseException] = queue.Queue(maxsize=1)
        self._closed = threading.Event()
        threading.Thread(target=self._read, args=(at,), name="stream", daemon=True).start()

    def next(self) -> Block:
        """Return the next block. Raises the reader's error, and RunError for a stream that gives none in time."""
        try:
            block = self._ready.get(timeout=self._timeout_s)
        except queue.Empty:
            raise RunError(
                f"{self._reader.name}: the stream has given no block for data.stream.timeout_s={self._timeout_s:g} s, "
                f"after {self._last.rows:,} rows of epoch {self._last.epoch}, in {self._shard()}; the same command "
                "goes on from the last checkpoint"
            ) from None
        if isinstance(block, BaseException):
            raise block
        self._last = block.after
        return block

    def close(self) -> None:
        """Let the thread end; it may still wait for a read."""
        self._closed.set()

    def _shard(self) -> str:
        shards = self._reader.shards
        return f"shard {self._last.shard + 1} of {len(shards)}"

    def _read(self, at: Position) -> None:
        try:
            for block in self._reader.blocks(at):
                if not self._put(block):
                    return
        except BaseException as error:  # noqa: BLE001 raised where the block is needed
            self._put(error)

    def _put(self, item: Block | BaseException) -> bool:
        """Return whether someone still waits for what was put."""
        while not self._closed.is_set():
            try:
                self._ready.put(item, timeout=0.5)
            except queue.Full:
                continue
            return True
        return False
