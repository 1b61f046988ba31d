"""Streams of prompts: shards from any row on, blocks that depend on their position alone, draws, errors, stalls."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mega_rl.data.columns import RowColumns
from mega_rl.data.order import MixtureSampler
from mega_rl.data.prompts import PromptReading, load_prompts
from mega_rl.data.stream import FileShard, Position, StreamPlan, StreamReader, StreamSampler
from mega_rl.errors import RunError, UserErrors
from mega_rl.types import Prompt

COLUMNS = RowColumns("prompt", "answer")
PLAN = StreamPlan(block_rows=8, shuffle=True, seed=0)
ROWS = [{"prompt": f"question {number}", "answer": str(number), "extra": [number]} for number in range(50)]


class Letters:
    """Tokenizer of one id for each letter."""

    def __call__(self, texts: list[str], *, add_special_tokens: bool) -> dict[str, Any]:
        return {"input_ids": [[ord(letter) for letter in text] for text in texts]}

    def apply_chat_template(self, conversation: list[dict[str, str]], **settings: Any) -> str:
        raise AssertionError


def reading(**changes: Any) -> PromptReading:
    return replace(PromptReading(Letters(), 200, COLUMNS, None, 20), **changes)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """A JSONL file of 13 rows with blank lines, and Parquet files of 20 and 17 in groups of 6."""
    jsonl, *parquet = [tmp_path / name for name in ("a.jsonl", "b.parquet", "c.parquet")]
    jsonl.write_text("\n\n".join(json.dumps(row) for row in ROWS[:13]) + "\n")
    for path, rows in zip(parquet, (ROWS[13:33], ROWS[33:]), strict=True):
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=6)
    return [jsonl, *parquet]


def reader_of(files: list[Path], plan: StreamPlan = PLAN, **changes: Any) -> StreamReader:
    return StreamReader("data.train_files", [FileShard(file) for file in files], reading(**changes), plan)


def order_of(reader: StreamReader, **settings: float) -> StreamSampler:
    def share(work: Callable[[], Any]) -> Any:
        return json.loads(json.dumps(work()))  # as ranks send it

    return StreamSampler(reader, share, batch_size=4, timeout_s=settings.get("timeout_s", 20.0))


@pytest.fixture
def order(files: list[Path]) -> Iterator[StreamSampler]:
    sampler = order_of(reader_of(files))
    yield sampler
    sampler.close()


def texts(prompts: list[Prompt]) -> list[str]:
    return [prompt.text for prompt in prompts]


@pytest.mark.parametrize("skip", [0, 1, 5, 6, 7, 12, 13, 16, 17, 20, 25])
def test_a_shard_is_read_from_any_row_on(files: list[Path], skip: int) -> None:
    for file in files:
        shard = FileShard(file)
        everything = list(shard.rows(COLUMNS, skip=0))
        assert list(shard.rows(COLUMNS, skip=skip)) == everything[skip:]


def test_an_epoch_has_every_prompt_once_and_those_of_memory(files: list[Path], order: StreamSampler) -> None:
    in_memory = load_prompts(files, reading())
    first, second = order.take(0, 50), order.take(50, 50)

    def content(prompt: Prompt) -> tuple[Any, ...]:
        return prompt.text, prompt.token_ids, prompt.answer

    assert sorted(map(content, first)) == sorted(map(content, second)) == sorted(map(content, in_memory))
    assert texts(first) != texts(second) != texts(in_memory)
    assert sorted(prompt.index for prompt in first) == list(range(50))


@pytest.mark.parametrize("drawn", [4, 8, 44, 48, 52, 96, 100])
def test_a_run_goes_on_from_its_position(files: list[Path], order: StreamSampler, drawn: int) -> None:
    """As a run that never stopped, whatever the sizes of the draws, and reading no more than a block before."""
    for first in range(0, drawn, 4):
        order.take(first, 4)
    numbers = json.loads(json.dumps(order.numbers()))
    resumed = order_of(reader_of(files))
    resumed.restore(numbers)
    assert drawn - numbers["first"] <= 4 + PLAN.block_rows
    assert resumed.take(drawn, 7) == order.take(drawn, 7)
    resumed.close()


def test_rows_that_cannot_be_used_are_named_or_dropped(tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    rows = [*ROWS[:10], {"prompt": 7, "answer": "7"}, {"prompt": "p" * 30, "answer": "1"}, *ROWS[12:16]]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    order = order_of(reader_of([file]))
    order.take(0, 8)
    with pytest.raises(UserErrors, match=r"bad\.jsonl:11: 'prompt' is a number"):
        order.take(8, 4)
    order.close()
    order = order_of(reader_of([file], malformed="drop", overlong="drop"))
    assert len(set(texts(order.take(0, 14)))) == 14
    order.close()


@dataclass(frozen=True)
class Stalled:
    """A shard that gives ten rows, and then nothing until it is let go."""

    release: threading.Event
    name: str = "stalled"

    def identity(self) -> str:
        return self.name

    def rows(self, columns: RowColumns, *, skip: int) -> Iterator[tuple[str, object]]:
        yield from ((f"stalled {number}", ROWS[number]) for number in range(10))
        self.release.wait(60)


def test_a_stream_that_stalls_ends_the_run_by_name() -> None:
    release = threading.Event()
    order = order_of(StreamReader("data.train_files", [Stalled(release)], reading(), PLAN), timeout_s=0.3)
    order.take(0, 8)
    with pytest.raises(RunError) as caught:
        order.take(8, 4)
    release.set()
    assert str(caught.value) == (
        "data.train_files: the stream has given no block for data.stream.timeout_s=0.3 s, after 8 rows of epoch 0, in "
        "shard 1 of 1; the same command goes on from the last checkpoint"
    )


def test_a_file_is_known_by_its_content(files: list[Path]) -> None:
    before = [FileShard(file).identity() for file in files]
    text = files[0].read_text()
    files[0].write_text(text.replace("question 6", "question 7"))
    after = [FileShard(file).identity() for file in files]
    assert before[0] != after[0]
    assert before[1:] == after[1:]


def test_a_mixture_of_streams_keeps_its_shares_and_positions(files: list[Path]) -> None:
    def mixed(shares: dict[str, int]) -> MixtureSampler:
        readers = {"a": reader_of(files[:1]), "b": reader_of(files[1:])}
        samplers = {name: order_of(replace(reader, source=name)) for name, reader in readers.items()}
        return MixtureSampler(samplers, shares, batch_size=4)

    order = mixed({"a": 1, "b": 3})
    first = order.take(0, 40)
    assert [prompt.source for prompt in first].count("b") == 30
    same = mixed({"a": 1, "b": 3})
    same.restore(json.loads(json.dumps(order.numbers())))
    assert same.take(40, 8) == order.take(40, 8)
    assert order.metrics(40)["data/a/prompts"] == 10
    assert "data/epochs" not in order.metrics(40)
    for each in (order, same):
        each.close()


def test_each_block_has_an_order_of_its_own(files: list[Path]) -> None:
    blocks = reader_of(files[1:2]).blocks(Position())
    orders = [[prompt.index - block.begin.rows for prompt in block.prompts] for block in (next(blocks), next(blocks))]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(8))
    assert orders[0] != orders[1]
