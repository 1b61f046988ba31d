"""Prompts: good files load, every bad row is named, order resumes."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mega_rl.data.chat import ChatTemplate
from mega_rl.data.columns import RewardColumns, RowColumns
from mega_rl.data.order import PromptSampler
from mega_rl.data.prompts import PromptReading, fingerprint, load_prompts, split
from mega_rl.errors import UserError, UserErrors
from mega_rl.types import Prompt


class ByteTokenizer:
    """One token per UTF-8 byte; 256 is the beginning-of-sequence token."""

    def __call__(self, texts: list[str], *, add_special_tokens: bool) -> dict[str, list[list[int]]]:
        return {"input_ids": [[256] * add_special_tokens + list(text.encode()) for text in texts]}

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert not tokenize
        if conversation[0]["content"] == "robot":
            raise ValueError("no robots")
        turns = "".join(f"<{turn['role']}>{turn['content']}" for turn in conversation)
        return turns + "<assistant>" * add_generation_prompt


def columns_of(reward: RewardColumns) -> RowColumns:
    return RowColumns("prompt", "answer", reward)


def load(*files: Path, **changed: Any) -> list[Prompt]:
    arguments: dict[str, Any] = {
        "tokenizer": ByteTokenizer(),
        "vocab_size": 257,
        "columns": columns_of(RewardColumns()),
        "max_prompt_tokens": 50,
        "template": None,
    } | changed
    if arguments.pop("chat_template", False):
        arguments["template"] = ChatTemplate(arguments["tokenizer"])
    return load_prompts(files, PromptReading(**arguments))


def jsonl(path: Path, rows: Sequence[Any]) -> Path:
    path.write_bytes(b"\n".join(row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows) + b"\n")
    return path


def problems(error: pytest.ExceptionInfo[UserErrors]) -> list[str]:
    return list(error.value.problems)


def test_jsonl(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "answer": "2", "noise": 1}, b"", {"prompt": "é", "answer": 7, "noise": [None]}]
    prompts = load(jsonl(tmp_path / "a.jsonl", rows), jsonl(tmp_path / "b.jsonl", [{"prompt": "x", "answer": 0.5}]))
    assert prompts == [
        Prompt(index=0, token_ids=(256, *b"1+1="), text="1+1=", answer="2"),
        Prompt(index=1, token_ids=(256, 0xC3, 0xA9), text="é", answer="7"),
        Prompt(index=2, token_ids=(256, ord("x")), text="x", answer="0.5"),
    ]


def test_chat_template(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1"}]
    file = jsonl(tmp_path / "a.jsonl", [{"prompt": "hi", "answer": "a"}, {"prompt": messages, "answer": "b"}])
    one, two = load(file, chat_template=True)
    assert bytes(one.token_ids) == b"<user>hi<assistant>"  # no token 256: the template adds its own
    assert one.text == "hi"
    assert bytes(two.token_ids) == b"<system>be brief<user>1+1<assistant>"
    assert two.text == "1+1"
    assert one.messages == (("user", "hi"),)
    assert two.messages == (("system", "be brief"), ("user", "1+1"))


def test_parquet(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    messages = [{"role": "user", "content": "hi"}]
    pq.write_table(pa.table({"prompt": ["a", "b"], "noise": [1, 2], "answer": [3, 4]}), file)
    chat = tmp_path / "chat.parquet"
    pq.write_table(pa.table({"prompt": [messages], "answer": ["x"]}), chat)
    assert [(p.index, p.text, p.answer) for p in load(file)] == [(0, "a", "3"), (1, "b", "4")]
    (prompt,) = load(chat, chat_template=True)
    assert (prompt.text, prompt.messages) == ("hi", (("user", "hi"),))


BAD_ROWS: list[tuple[Any, str]] = [
    (b'{"prompt": "a", ', "is not JSON"),
    (b'{"prompt": "\xff", "answer": "b"}', "is not UTF-8 (byte 13 of the line)"),
    (b"[" * 100_000, "is not usable JSON"),
    (b'{"prompt": "a", "answer": ' + b"9" * 5000 + b"}", "is not usable JSON"),
    (["a", "b"], "is a list, not an object"),
    ({"prompt": "a"}, "has no 'answer'; its keys are 'prompt'"),
    ({}, "has no 'prompt'; its keys are none"),
    ({"prompt": 3, "answer": "b"}, "'prompt' is a number, not a string"),
    ({"prompt": None, "answer": "b"}, "'prompt' is null"),
    ({"prompt": "a", "answer": ["b"]}, "'answer' is a list, not a string or a number"),
    ({"prompt": "a", "answer": True}, "'answer' is true or false"),
    ({"prompt": " \n", "answer": "b"}, "'prompt' is empty"),
    ({"prompt": [{"role": "user", "content": "a"}], "answer": "b"}, "needs data.chat.template=true"),
    (b'{"prompt": "\\ud800", "answer": "b"}', "half a surrogate pair"),
    (b'{"prompt": "a", "answer": "\\udfff"}', "'answer' holds"),
]


def test_every_bad_row_is_named(tmp_path: Path) -> None:
    good = {"prompt": "a", "answer": "b"}
    file = jsonl(tmp_path / "bad.jsonl", [good, *(row for row, _ in BAD_ROWS), good])
    with pytest.raises(UserErrors) as error:
        load(file)
    lines = problems(error)
    for number, (line, (_, expected)) in enumerate(zip(lines, BAD_ROWS, strict=False), start=2):
        assert line.startswith(f"{file}:{number}: ")
        assert expected in line
    assert lines[len(BAD_ROWS) :] == []  # most rows have a problem: dropping them is no way out


def test_bad_rows_can_be_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = {"prompt": "a", "answer": "b"}
    file = jsonl(tmp_path / "bad.jsonl", [*(row for row, _ in BAD_ROWS), good])
    with caplog.at_level(logging.WARNING):
        (prompt,) = load(file, malformed="drop")
    assert prompt.index == len(BAD_ROWS)
    assert f"{len(BAD_ROWS)} rows are dropped, the first is {file}:1" in caplog.text


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "rows.csv").touch()
    names = ["missing.jsonl", "empty.jsonl", "folder.jsonl", "rows.csv"]
    with pytest.raises(UserErrors) as error:
        load(*(tmp_path / name for name in names))
    assert problems(error) == [
        f"{tmp_path}/missing.jsonl: no such file",
        f"{tmp_path}/empty.jsonl: holds no rows",
        f"{tmp_path}/folder.jsonl: is a folder, not a file",
        f"{tmp_path}/rows.csv: unknown suffix '.csv': prompt files are .jsonl or .parquet",
    ]
    with pytest.raises(UserError, match=r"data\.train_files"):
        load()


def test_overlong_prompts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = jsonl(tmp_path / "a.jsonl", [{"prompt": "x" * n, "answer": "y"} for n in (4, 5, 6, 3, 2)])
    with pytest.raises(UserErrors) as error:
        load(file, max_prompt_tokens=5)
    assert problems(error) == [
        f"2 of 5 rows of {file} (first: line 2): the prompt has 6 tokens, above data.max_prompt_tokens=5",
        "set data.overlong_prompts=drop to go on without them",
    ]
    with caplog.at_level(logging.WARNING):
        kept = load(file, max_prompt_tokens=5, overlong="drop")
    assert [prompt.index for prompt in kept] == [0, 3, 4]
    assert "2 rows are dropped" in caplog.text
    with pytest.raises(UserError, match="no usable prompt is left of 5 rows"):
        load(file, max_prompt_tokens=2, overlong="drop")


def test_foreign_token_ids_are_never_dropped(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "answer": "y"}])
    with pytest.raises(UserErrors, match=r"a\.jsonl:1: token id 256 is outside the model's vocabulary of 256"):
        load(file, vocab_size=256, malformed="drop", overlong="drop")


def some(count: int) -> list[Prompt]:
    return [Prompt(index=i, token_ids=(i,), text=str(i), answer=str(-i)) for i in range(count)]


def test_split() -> None:
    prompts = some(20)
    train, held_out = split(prompts, 5, seed=3)
    assert (len(train), len(held_out)) == (15, 5)
    assert sorted([*train, *held_out], key=lambda p: p.index) == prompts
    assert [p.index for p in train] == sorted(p.index for p in train)
    assert split(prompts, 5, seed=3) == (train, held_out)
    assert split(prompts, 5, seed=4)[1] != held_out
    assert split(prompts, 0, seed=3) == (prompts, [])
    with pytest.raises(UserError, match=r"data\.val_size=20"):
        split(prompts, 20, seed=3)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("size", "batch_size"), [(10, 3), (4, 10), (5, 5), (1, 2)])
def test_each_epoch_has_every_prompt_once(size: int, batch_size: int, shuffle: bool) -> None:
    sampler = PromptSampler(some(size), batch_size=batch_size, shuffle=shuffle, seed=1)
    served = [prompt.index for step in range(size) for prompt in sampler.batch(step)]  # batch_size whole epochs
    epochs = [served[i * size : (i + 1) * size] for i in range(batch_size)]
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
    if not shuffle:
        assert epochs == [list(range(size))] * batch_size
    elif size >= 10:
        assert len({tuple(epoch) for epoch in epochs}) == batch_size


def test_fingerprint() -> None:
    prompts = some(3)
    same = fingerprint(some(3))
    assert fingerprint(prompts) == same
    assert len(same) == 64
    assert fingerprint(prompts[::-1]) != same
    assert fingerprint(prompts[:2]) != same
    changed = [*prompts[:2], Prompt(index=2, token_ids=(2,), text="2", answer="x")]
    assert fingerprint(changed) != same
    # What older runs wrote stays valid: the messages are in the token ids.
    assert same == "f316bdcfee8d7ca1fcedcbf0d61b1d531f9ee685856f782c8289c7b5ea2e2014"
    assert fingerprint([replace(prompt, messages=(("user", "x"),)) for prompt in prompts]) == same
    # Where one text ends and the next begins matters.
    a = [Prompt(index=0, token_ids=(1,), text="ab", answer="c")]
    b = [Prompt(index=0, token_ids=(1,), text="a", answer="bc")]
    assert fingerprint(a) != fingerprint(b)


def test_a_step_depends_on_its_number_alone() -> None:
    sampler = PromptSampler(some(10), batch_size=7, shuffle=True, seed=1)
    onwards = [sampler.batch(step) for step in range(6)]
    resumed = PromptSampler(some(10), batch_size=7, shuffle=True, seed=1)
    assert [resumed.batch(step) for step in (5, 0, 3, 4, 2, 1)] == [onwards[i] for i in (5, 0, 3, 4, 2, 1)]
    other = PromptSampler(some(10), batch_size=7, shuffle=True, seed=2)
    assert [other.batch(step) for step in range(6)] != onwards
