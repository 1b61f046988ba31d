"""Prompts of each step from a stream that one rank reads."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mega_rl.data.sampling.epochs import StepOrder
from mega_rl.data.stream.blocks import BlocksAhead, Position, PromptBlock, StreamReader
from mega_rl.errors import UserError
from mega_rl.types import JsonObject, Metrics, Prompt

# Calls work that returns JSON on the rank that reads, and returns its result on every rank; collective.
Share = Callable[[Callable[[], JsonObject]], JsonObject]


class StreamSampler(StepOrder):
    """The prompts of each step, a function of the arguments, the step and the stream's content.

    One rank holds the stream: the block that is drawn from, and the next one. The others get the prompts of each draw.
    Draws come in order; those of the last `take` may be asked for again, and a checkpoint keeps the position of their
    block.
    """

    def __init__(self, reader: StreamReader | None, share: Share, *, batch_size: int, timeout_s: float) -> None:
        """reader: on the rank that reads; None on others."""
        super().__init__(batch_size=batch_size, num_prompts=0)
        self._reader, self._share, self._timeout_s = reader, share, timeout_s
        self._at = Position()  # block of the first draw of the last `take`
        self._epochs, self._waited = 0.0, 0.0
        self._ahead: BlocksAhead | None = None
        self._block: PromptBlock | None = None  # that `_ahead` gave last

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

    def _read(self, first: int, count: int) -> JsonObject:
        """Return the prompts of draws with their block's position, and epochs so far, as JSON carries them."""
        assert self._reader is not None
        block = self._seek(first)
        at, prompts = block.begin, []
        for number in range(first, first + count):
            while number >= block.after.first:
                block = self._next()
            prompts.append(_row(block.prompts[number - block.begin.first], self._reader.name))
        epochs = block.after.epoch + block.after.shard / len(self._reader.shards)
        return {"at": list(at), "epochs": epochs, "prompts": prompts}

    def _seek(self, first: int) -> PromptBlock:
        """Return the block of a draw, reading again from the last position where it has passed."""
        assert first >= self._at.first, f"draw {first} of a stream at {self._at}"
        if self._ahead is None or self._block is None or first < self._block.begin.first:
            self.close()
            assert self._reader is not None
            self._ahead = BlocksAhead(self._reader, self._at, timeout_s=self._timeout_s)
            self._block = self._ahead.next()
        while first >= self._block.after.first:
            self._block = self._next()
        return self._block

    def _next(self) -> PromptBlock:
        assert self._ahead is not None
        self._block = self._ahead.next()
        return self._block

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = self._block = None


def _row(prompt: Prompt, name: str) -> list[object]:
    """Return a prompt as JSON carries it. Raises UserError for a column that JSON has no word for."""
    columns = None if prompt.row is None else dict(prompt.row)
    for key, value in (columns or {}).items():
        if not _is_json(value):
            raise UserError(
                f"{name}: the column {key!r} holds a {type(value).__name__}, which a stream cannot send to other "
                "ranks; write it as a string, or leave the column out"
            )
    messages = [list(turn) for turn in prompt.messages]
    return [prompt.index, list(prompt.token_ids), prompt.text, prompt.answer, messages, columns, prompt.source]


def _prompt(row: Sequence[Any]) -> Prompt:
    index, token_ids, text, answer, messages, columns, source = row
    turns = tuple((role, content) for role, content in messages)
    return Prompt(index, tuple(token_ids), text, answer, turns, columns, source)


def _is_json(value: object) -> bool:
    """Return whether a value comes back from JSON as it is."""
    if isinstance(value, list):
        return all(map(_is_json, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(inner) for key, inner in value.items())
    return value is None or isinstance(value, str | bool | int | float)
