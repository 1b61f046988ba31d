"""What a row means does not depend on its file: messages, tools and numbers of JSONL, Parquet and streams."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mega_rl.data.chat import ChatTemplate
from mega_rl.data.columns import RewardColumns, RowColumns, RowProblem, conversation
from mega_rl.data.prompts import PromptReading, load_prompts, split
from mega_rl.data.stream import FileShard, Position, StreamPlan, StreamReader
from mega_rl.errors import UserErrors
from mega_rl.types import Prompt

TEMPLATE = (
    "{% for t in tools or [] %}[{{ t | tojson }}]{% endfor %}{% for m in messages %}<{{ m.role }}"
    "{% if m.name is defined %} {{ m.name }}{% endif %}>{{ m.content }}"
    "{% if 'tool_calls' in m %}{% for c in m.tool_calls %}{{ c | tojson }}{% endfor %}{% endif %}{% endfor %}"
    "{% if think is defined %}think={{ think }}{% endif %}<assistant>"
)

COLUMNS = RowColumns("prompt", "answer")


class Letters:
    """Tokenizer of one id for each letter, with a chat template."""

    def __init__(self, template: str = TEMPLATE) -> None:
        self.chat_template = template

    def __call__(self, texts: list[str], *, add_special_tokens: bool) -> dict[str, Any]:
        return {"input_ids": [list(map(ord, text)) for text in texts]}

    def apply_chat_template(self, conversation: list[dict[str, Any]], **variables: Any) -> str:
        return jinja2.Template(self.chat_template).render(messages=conversation, **variables)


def write(folder: Path, rows: Sequence[dict[str, Any]], schema: pa.Schema | None = None) -> list[Path]:
    """Return the same rows as JSONL and as Parquet, whose first row group is empty."""
    files = [folder / "rows.jsonl", folder / "rows.parquet"]
    files[0].write_text("".join(json.dumps(row, default=float) + "\n" for row in rows))
    keys = dict.fromkeys(key for row in rows for key in row)
    table = pa.Table.from_pylist([dict.fromkeys(keys) | row for row in rows], schema)
    with pq.ParquetWriter(files[1], table.schema) as writer:
        writer.write_table(table.slice(0, 0))
        writer.write_table(table)
    return files


def read(file: Path, template: str = TEMPLATE, columns: RowColumns = COLUMNS) -> list[Prompt]:
    """Return the prompts of a file, in memory and streamed alike."""
    tokenizer = Letters(template)
    chat = ChatTemplate(tokenizer)
    reading = PromptReading(tokenizer, 1 << 21, columns, chat, 999)
    prompts = load_prompts([file], reading)
    stream = StreamReader("data.train_files", [FileShard(file)], reading, StreamPlan(999, shuffle=False, seed=0))
    assert stream.first_block() == prompts
    return prompts


def shown(prompts: Sequence[Prompt]) -> list[str]:
    return ["".join(map(chr, prompt.token_ids)) for prompt in prompts]


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def turn(role: str, content: Any = "c", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
OTHER = {"type": "function", "function": {"name": "g", "arguments": {"y": "b"}}}


def test_messages_of_parquet_are_those_of_jsonl(tmp_path: Path) -> None:
    rows = [
        {"prompt": [user("a", name="bob")], "answer": "1"},
        {"prompt": [user("a"), turn("assistant", tool_calls=[CALL, OTHER]), turn("tool", "5")], "answer": "2"},
        {"prompt": [user("a"), {"role": "assistant", "tool_calls": [OTHER]}, turn("tool", "5")], "answer": "2"},
        {"prompt": [user("plain")], "answer": "3", "tools": [CALL], "chat_template_kwargs": {"think": True}},
        {"prompt": [user("plain")], "answer": "3", "tools": [OTHER, CALL], "chat_template_kwargs": {}},
        {"prompt": [user("null", name=None)], "answer": "3", "tools": None},
    ]
    of_jsonl, of_parquet = map(read, write(tmp_path, rows))
    assert of_jsonl == of_parquet
    texts = shown(of_jsonl)
    assert texts[0] == "<user bob>a<assistant>"
    assert texts[1].count("arguments") == 2
    assert texts[3] == f"[{jinja2.filters.do_tojson(jinja2.nodes.EvalContext(jinja2.Environment()), CALL)}]" + (
        "<user>plainthink=True<assistant>"
    )
    assert texts[5] == "<user>null<assistant>"
    assert not any("None" in text or "null" in text.replace(">null<", "") for text in texts[:2] + texts[3:])


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"tools": "["}, "'tools' is a string that is not JSON"),
        ({"tools": {"a": 1}}, "'tools' is an object, not a list"),
        ({"chat_template_kwargs": [1]}, "'chat_template_kwargs' is a list, not an object"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "has 'chat_template', which the run itself sets"),
    ],
)
def test_unusable_variables_of_a_row_are_refused(tmp_path: Path, columns: dict[str, Any], expected: str) -> None:
    for file in write(tmp_path, [{"prompt": "a", "answer": "1", **columns}]):
        with pytest.raises(UserErrors, match=expected):
            read(file)


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([turn("robot")], "message 1 of 'p' has the role 'robot'; legal: system, "),
        ([{"content": "a"}], "message 1 of 'p' has the role None"),
        ([user("a"), turn("assistant", "5")], "'p' ends with a message of the assistant"),
        ([turn("system")], "'p' ends with a message of the system"),
        ([user("a"), turn("system"), user("b")], "message 2 of 'p' is 'system' and not at the beginning, once"),
        ([turn("system"), turn("system"), user("a")], "message 2 of 'p' is 'system' and not at the beginning, once"),
        ([turn("assistant"), user("a")], "message 1 of 'p' is 'assistant' without a message of the user before"),
        ([user("a"), turn("assistant"), turn("assistant"), user("b")], "message 3 of 'p' is 'assistant' without"),
        ([user("a"), user("b")], "message 2 of 'p' is 'user' after another message of the user"),
        ([user("a"), turn("tool")], "message 2 of 'p' is 'tool' without a message of the assistant"),
        ([user("a"), {"role": "assistant"}, user("b")], "message 2 of 'p' has a 'content' that is null, not a string"),
        ([user(None)], "message 1 of 'p' has a 'content' that is null"),
        ([user([{"type": "text", "text": "a"}])], "message 1 of 'p' has a 'content' that is a list, not a string"),
        ([user(5)], "message 1 of 'p' has a 'content' that is a number"),
        (["a"], "message 1 of 'p' is not an object"),
        ([], "'p' is an empty list of messages"),
    ],
)
def test_broken_conversations_are_refused(messages: list[Any], expected: str) -> None:
    with pytest.raises(RowProblem, match=expected):
        conversation(messages, "p")


@pytest.mark.parametrize(
    "roles",
    ["user", "system user", "developer user", "system developer user", "user assistant user",
     "user assistant tool tool", "system user assistant tool assistant user", "user assistant tool user"],
)  # fmt: skip
def test_whole_conversations_are_read(roles: str) -> None:
    messages = [turn(role) for role in roles.split()]
    assert conversation(messages, "p") == messages


def answers(file: Path, *, structured: bool = False) -> list[Any]:
    columns = RowColumns("prompt", "answer", RewardColumns(structured=structured))
    return [prompt.answer for prompt in read(file, columns=columns)]


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        (pa.float64(), [72.0, 1e16, 1e22, 1e-7, 0.1, -0.0, -2.50, 123456.789], None),
        (pa.float32(), [0.1, 72.0, 3e-5, 16777216.0], ["0.1", "72", "0.00003", "16777216"]),
        (pa.float16(), [0.1, 5.0], ["0.1", "5"]),
        (pa.decimal128(9, 2), [1.5, 72], ["1.5", "72"]),
        (pa.int64(), [7, -(2**63)], ["7", str(-(2**63))]),
    ],
)
def test_numbers_as_text(tmp_path: Path, kind: pa.DataType, values: list[Any], expected: list[str] | None) -> None:
    expected = expected or ["72", "1" + "0" * 16, "1" + "0" * 22, "0.0000001", "0.1", "0", "-2.5", "123456.789"]
    rows = [{"prompt": "a", "answer": value} for value in values]
    table = pa.table({"prompt": ["a"] * len(values), "answer": pa.array(values).cast(kind)})
    pq.write_table(table, tmp_path / "narrow.parquet")
    assert answers(tmp_path / "narrow.parquet") == expected
    assert answers(write(tmp_path, rows)[0]) == expected


def reverse(text: str) -> str:
    return text[::-1]


@pytest.mark.parametrize("way", ["long", "malformed", "empty", "split", "mixture", "stream"])
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_every_prompt_keeps_the_answer_of_its_row(tmp_path: Path, way: str, suffix: str) -> None:
    """The answer is a function of the prompt; rows are dropped between, held out, and read as parts and blocks."""
    given = [{"prompt": f"row {number}", "answer": reverse(f"row {number}")} for number in range(40)]
    for place in (0, 7, 8, 25, 39):
        given[place] |= {"long": {"prompt": "x" * 99}, "empty": {"prompt": " "}}.get(way, {"answer": None})
    (tmp_path / "other").mkdir()
    files = [
        next(file for file in write(folder, rows) if file.suffix == suffix)
        for folder, rows in ((tmp_path, given[:30]), (tmp_path / "other", given[30:]))
    ]
    reading = PromptReading(Letters(), 1 << 21, COLUMNS, ChatTemplate(Letters()), 40, "drop", "drop")
    if way == "stream":
        shards = [FileShard(file) for file in files]
        reader = StreamReader("data.train_files", shards, reading, StreamPlan(7, shuffle=True, seed=3))
        blocks = reader.blocks(Position())
        prompts = [prompt for _ in range(6) for prompt in next(blocks).prompts]
    else:
        parts = [[file] for file in files] if way == "mixture" else [files]
        prompts = [prompt for part in parts for prompt in load_prompts(part, reading)]
    if way == "split":
        train, held_out = split(prompts, 9, seed=1)
        assert (len(train), len(held_out)) == (26, 9)
        prompts = train + held_out
    assert len({prompt.text for prompt in prompts}) == 35
    for prompt in prompts:
        assert prompt.answer == reverse(prompt.text)
        assert shown([prompt]) == [f"<user>{prompt.text}<assistant>"]
