"""Training prompts that are read during the run: shards, blocks of rows, prompts of steps.

An epoch reads all shards once, in a random order. The rows of its shards, one after the other, are cut into blocks, and
the prompts of a block are shuffled. Both orders are functions of the seed, so a block depends only on the place where
it begins: a position is all that a resumed run needs.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from mega_rl.config.values import is_json
from mega_rl.data.columns import RowColumns
from mega_rl.data.order import STREAM, StepOrder, permutation
from mega_rl.data.prompts import PromptReading
from mega_rl.data.rows import one_line, read_jsonl, read_parquet, with_short_floats
from mega_rl.errors import RunError, UserError
from mega_rl.processes import Running
from mega_rl.types import Given, JsonObject, Metrics, Prompt

SAMPLE_BYTES = 1 << 16  # from the beginning, the middle and the end of a file, which identify it

# Calls a function that returns JSON on the rank that reads, and returns its result on every rank; collective.
Share = Callable[[Callable[[], JsonObject]], JsonObject]


class StreamShard(Protocol):
    """A part of a stream, such as a file."""

    @property
    def name(self) -> str:
        """Name for people."""

    def identity(self) -> str:
        """Return text that changes with the content. Raises UserError if it cannot be read."""

    def rows(self, columns: RowColumns, *, skip: int) -> Iterator[tuple[str, object]]:
        """Yield (place, row) from row `skip` on, counted from 0; a RowProblem for an unreadable row."""


@dataclass(frozen=True)
class FileShard:
    """A local JSONL or Parquet file."""

    path: Path

    @property
    def name(self) -> str:
        return str(self.path)

    def identity(self) -> str:
        """Return name, size and SHA-256 of 192 KiB: large files take too long to read whole."""
        digest = hashlib.sha256()
        try:
            size = self.path.stat().st_size
            with self.path.open("rb") as file:
                for place in sorted({0, max(0, (size - SAMPLE_BYTES) // 2), max(0, size - SAMPLE_BYTES)}):
                    file.seek(place)
                    digest.update(file.read(SAMPLE_BYTES))
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read: {one_line(error)}") from error
        return f"{self.path.name} {size} {digest.hexdigest()}"

    def rows(self, columns: RowColumns, *, skip: int) -> Iterator[tuple[str, object]]:
        try:
            is_table = self.path.suffix == ".parquet"
            yield from read_parquet(self.path, columns, skip=skip) if is_table else read_jsonl(self.path, skip=skip)
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read: {one_line(error)}") from error


class Position(NamedTuple):
    """Place in a stream where a block begins."""

    epoch: int = 0
    shard: int = 0  # place in the epoch's order of shards
    row: int = 0  # row of the shard
    rows: int = 0  # rows of the epoch in earlier blocks
    block: int = 0  # since the run began
    first: int = 0  # draw of the block's first prompt


class PromptBlock(NamedTuple):
    """Prompts of consecutive rows, in the order of their draws."""

    prompts: list[Prompt]
    begin: Position
    after: Position  # begin of the next block


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
    source: str = ""  # name in a mixture; "": prompts keep the source of their row
    check: Callable[[Sequence[Prompt]], None] | None = None  # gets a block; raises UserError for unusable rows

    def first_block(self) -> list[Prompt]:
        """Return the first block's prompts in draw order. Raises UserError as `blocks` does."""
        return next(self.blocks(Position())).prompts

    def blocks(self, at: Position) -> Iterator[PromptBlock]:
        """Yield block after block, epoch after epoch, without an end."""
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

    def _block(self, chunk: Sequence[tuple[str, object, int, int]], at: Position) -> PromptBlock:
        """Return the block of some rows of `_epoch`."""
        rows = ((where, content) for where, content, _, _ in chunk)
        prompts, _ = self.reading.prompts(rows, [], first=at.rows)
        if self.source:
            prompts = [replace(prompt, source=self.source) for prompt in prompts]
        if self.check is not None:
            self.check(prompts)
        if self.plan.shuffle:
            order = permutation(len(prompts), key=(self.plan.seed, STREAM, 1, at.block, *self.plan.key))
            prompts = [prompts[place] for place in order]
        _, _, shard, row = chunk[-1]
        after = Position(at.epoch, shard, row, at.rows + len(chunk), at.block + 1, at.first + len(prompts))
        return PromptBlock(prompts, at, after)

    def _epoch(self, at: Position) -> Iterator[tuple[str, object, int, int]]:
        """Yield (place, content, shard, next row of the shard) of an epoch from a position on."""
        order = list(range(len(self.shards)))
        if self.plan.shuffle:
            order = permutation(len(self.shards), key=(self.plan.seed, STREAM, 0, at.epoch, *self.plan.key))
        for place in range(at.shard, len(order)):
            skip = at.row if place == at.shard else 0
            shard, columns = self.shards[order[place]], self.reading.columns
            schema = getattr(shard, "schema", None)  # rows of the Hub have Python's wide floats
            for number, (where, content) in enumerate(shard.rows(columns, skip=skip), start=skip + 1):
                if schema is not None and isinstance(content, dict):
                    content = with_short_floats(content, columns.answer, schema)
                yield where, content, place, number


class StreamSampler(StepOrder):
    """The prompts of each step, a function of the arguments, the step and the stream's content.

    One rank holds the stream: the block to draw from, and a thread that reads the next one. The others get the prompts
    of each draw. Draws come in order; those of the last `take` may be asked for again, and a checkpoint keeps the
    position of their block.
    """

    def __init__(self, reader: StreamReader | None, share: Share, *, batch_size: int, timeout_s: float) -> None:
        """reader: on the rank that reads; None on others."""
        super().__init__(batch_size=batch_size, num_prompts=0)
        self._reader, self._share, self._timeout_s = reader, share, timeout_s
        self._at = Position()  # block of the first draw of the last `take`
        self._epochs, self._waited = 0.0, 0.0
        self._block: PromptBlock | None = None
        self._ahead: Running[PromptBlock] | None = None  # reads the block after it
        self._blocks: Iterator[PromptBlock] = iter(())

    def take(self, first: int, count: int) -> list[Prompt]:
        """Return `count` prompts from number `first` on; collective. Raises UserError or RunError on all ranks."""
        begin = time.perf_counter()
        answer = self._share(lambda: self._read(first, count))
        self._waited += time.perf_counter() - begin
        self._at, self._epochs = Position(*answer["at"]), answer["epochs"]
        return [_prompt(row) for row in answer["prompts"]]

    def numbers(self) -> dict[str, int]:
        return self._at._asdict()

    def restore(self, numbers: Mapping[str, int]) -> None:
        if numbers.keys() >= set(Position._fields):
            self._at = Position(*(numbers[name] for name in Position._fields))

    def waits(self) -> Metrics:
        waited, self._waited = self._waited, 0.0
        return {"data/stream_wait_s": waited}

    def epochs(self, drawn: int) -> float:
        return self._epochs

    def metrics(self, drawn: int) -> Metrics:
        return {"data/prompts": float(drawn), "data/epochs": self._epochs}

    def close(self) -> None:
        """Forget the stream; its thread ends after the block that it reads."""
        self._ahead = self._block = None

    def _read(self, first: int, count: int) -> JsonObject:
        """Return draws' prompts with their block's position, and the epochs so far, for JSON."""
        assert self._reader is not None
        assert first >= self._at.first, f"draw {first} of a stream at {self._at}"
        block = self._block
        if block is None or first < block.begin.first:  # read again from the last position
            self._blocks = self._reader.blocks(self._at)
            self._read_ahead()
            block = self._next(self._at)
        while first >= block.after.first:
            block = self._next(block.after)
        at, prompts = block.begin, []
        for number in range(first, first + count):
            while number >= block.after.first:
                block = self._next(block.after)
            prompts.append(_row(block.prompts[number - block.begin.first], self._reader.name))
        epochs = block.after.epoch + block.after.shard / len(self._reader.shards)
        return {"at": list(at), "epochs": epochs, "prompts": prompts}

    def _next(self, at: Position) -> PromptBlock:
        """Return the block at a position. Raises the reader's error, or RunError after the deadline."""
        assert self._reader is not None
        assert self._ahead is not None
        if self._ahead.wait(self._timeout_s):
            raise RunError(
                f"{self._reader.name}: the stream has given no block for data.stream.timeout_s={self._timeout_s:g} s, "
                f"after {at.rows:,} rows of epoch {at.epoch}, in shard {at.shard + 1} of {len(self._reader.shards)}; "
                "the same command goes on from the last checkpoint"
            )
        block = self._block = self._ahead.outcome()
        self._read_ahead()
        return block

    def _read_ahead(self) -> None:
        self._ahead = Running(partial(next, self._blocks), name="stream")


def _row(prompt: Prompt, name: str) -> list[object]:
    """Return a prompt for JSON. Raises UserError for a column that JSON cannot hold."""
    columns = None if prompt.row is None else dict(prompt.row)
    for key, value in (columns or {}).items():
        if not is_json(value, finite=False):
            raise UserError(
                f"{name}: the column {key!r} holds a {type(value).__name__}, which a stream cannot send to other "
                "ranks; write it as a string, or leave the column out"
            )
    messages = [list(turn) for turn in prompt.messages]
    given = [[one.token_ids, one.spans] for one in prompt.given]
    return [
        *(prompt.index, list(prompt.token_ids), prompt.text, prompt.answer),
        *(messages, columns, prompt.source, given, prompt.worth),
    ]


def _prompt(row: Sequence[Any]) -> Prompt:
    index, token_ids, text, answer, messages, columns, source, given, worth = row
    turns = tuple((role, content) for role, content in messages)
    answers = tuple(Given(tuple(ids), tuple((first, end) for first, end in spans)) for ids, spans in given)
    return Prompt(index, tuple(token_ids), text, answer, turns, columns, source, answers, worth)
