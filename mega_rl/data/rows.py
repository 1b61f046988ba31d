"""Rows of JSONL and Parquet files: read, checked one by one, and rendered as text; not tokenised yet.

A JSONL file is read line by line here: Hugging Face `datasets` infers one schema for the whole file, fails on columns
that no setting names, and cannot say which line is at fault. Parquet goes through `datasets`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from mega_rl.data.chat import ChatTemplate
from mega_rl.data.columns import RewardColumns, RowColumns
from mega_rl.data.source import RowSource
from mega_rl.errors import UserError, no_such
from mega_rl.types import Answer


@dataclass(frozen=True)
class PromptRow:
    """A readable row that is not tokenised yet."""

    where: str  # "train.jsonl:17"
    index: int  # row number over all files
    text: str  # what the reward function sees
    model_text: str  # what the model sees
    answer: Answer
    messages: tuple[tuple[str, str], ...]  # with a chat template alone
    source: str
    difficulty: float
    columns: Mapping[str, Any] | None  # all of them, where the reward reads them


class RowProblem(Exception):
    """A row cannot be used; the message says why."""


def read_rows(
    files: Sequence[str | Path] | RowSource, columns: RowColumns, fatal: list[str]
) -> Iterator[tuple[str, object]]:
    """Yield (place, row) of every file, or of a source; a RowProblem for an unreadable row, problems of files aside."""
    if isinstance(files, RowSource):
        yield from files.read(fatal)
        return
    for file in map(Path, files):
        yield from _read(file, columns, fatal)


def _read(file: Path, columns: RowColumns, fatal: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield (place, row) of one file, a RowProblem for an unreadable row; problems of the file go to `fatal`."""
    readers = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
    if file.suffix not in readers:
        fatal.append(f"{file}: unknown suffix {file.suffix!r}: prompt files are .jsonl or .parquet")
        return
    if not file.is_file():
        fatal.append(f"{file}: {'is a folder, not a file' if file.is_dir() else no_such('file', file)}")
        return
    empty = True
    try:
        for place in readers[file.suffix](file, columns):
            empty = False
            yield place
    except OSError as error:
        fatal.append(f"{file}: cannot be read: {one_line(error)}")
        return
    except UserError as error:
        fatal.append(str(error))
        return
    if empty:
        fatal.append(f"{file}: holds no rows")


def one_line(error: Exception) -> str:
    """Return the error's text on one line; Arrow's and Jinja's have several."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(reason.split())


def _read_jsonl(file: Path, columns: RowColumns) -> Iterator[tuple[str, Any]]:
    return read_jsonl(file)


def read_jsonl(file: Path, *, skip: int = 0) -> Iterator[tuple[str, object]]:
    """Yield (place, row) of a JSONL file from row `skip` on, a RowProblem for an unreadable row."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            if skip:
                skip -= 1
                continue
            try:
                row: Any = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError as error:
                row = RowProblem(f"is not UTF-8 (byte {error.start + 1} of the line)")
            except json.JSONDecodeError as error:
                row = RowProblem(f"is not JSON: {error.msg} at column {error.colno}")
            except (ValueError, RecursionError) as error:  # numbers of thousands of digits, nesting without end
                row = RowProblem(f"is not usable JSON: {error}")
            yield f"{file}:{number}", row


def _read_parquet(file: Path, columns: RowColumns) -> Iterator[tuple[str, Any]]:
    """Yield rows with only the columns that are read; streaming, so that nothing is copied to a cache."""
    import datasets  # takes more than a second to import, and JSONL does without
    import pyarrow
    import pyarrow.parquet

    try:
        names = pyarrow.parquet.read_schema(file).names
        missing = [key for key in columns.needed if key not in names]
        if missing:
            raise UserError(f"{file}: has no column {', '.join(missing)}; its columns are {', '.join(names)}")
        read = columns.read_of(names)
        stream = datasets.load_dataset("parquet", data_files=str(file), split="train", streaming=True, columns=read)
        for number, row in enumerate(stream, start=1):
            yield f"{file}: row {number}", row
    except (pyarrow.ArrowException, datasets.exceptions.DatasetGenerationError) as error:
        raise UserError(f"{file}: is not a readable Parquet file: {one_line(error)}") from error


def parse_row(row: object, where: str, index: int, columns: RowColumns, template: ChatTemplate | None) -> PromptRow:
    """Return the row's prompt and answer. Raises RowProblem."""
    prompt_key, answer_key = columns.prompt, columns.answer
    if isinstance(row, RowProblem):
        raise row
    if not isinstance(row, dict):
        raise RowProblem(f"is {_kind(row)}, not an object with {prompt_key!r} and {answer_key!r}")
    for key in columns.needed:
        if key not in row:
            raise RowProblem(f"has no {key!r}; its keys are {', '.join(map(repr, row)) or 'none'}")
    answer = _answer(row.get(answer_key), answer_key, columns.reward)
    prompt = row[prompt_key]
    if isinstance(prompt, str):
        text, messages = prompt, [{"role": "user", "content": prompt}]
    elif isinstance(prompt, list):
        if template is None:
            raise RowProblem(f"{prompt_key!r} is a list of messages, which needs data.chat.template=true")
        messages = _messages(prompt, prompt_key)
        text = messages[-1]["content"]
    else:
        raise RowProblem(f"{prompt_key!r} is {_kind(prompt)}, not a string or a list of messages")
    if not text.strip():
        raise RowProblem(f"{prompt_key!r} is empty")
    messages = [] if template is None else template.complete(messages)
    model_text = text if template is None else _render(messages, template)
    _check_unicode((prompt_key, model_text), (answer_key, json.dumps(answer, ensure_ascii=False)))
    turns = tuple((turn["role"], turn["content"]) for turn in messages)
    return PromptRow(
        where=where,
        index=index,
        text=text,
        model_text=model_text,
        answer=answer,
        messages=turns,
        source=columns.source_of(row),
        difficulty=_difficulty(row[columns.difficulty], columns.difficulty) if columns.difficulty else 0.0,
        columns=row if columns.reward.every else None,
    )


def _answer(value: object, key: str, reward: RewardColumns) -> Answer:
    """Return a row's answer, a number as a string; None where there is none and none is needed. Raises RowProblem."""
    if isinstance(value, str) or (value is None and not reward.answer):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if reward.structured and isinstance(value, (bool, list, dict)):
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:  # a date or bytes in a Parquet file
            raise RowProblem(f"{key!r} holds something that JSON has no word for: {error}") from error
        return value
    legal = "a string, a number, a list or an object" if reward.structured else "a string or a number"
    raise RowProblem(f"{key!r} is {_kind(value)}, not {legal}")


def _difficulty(value: object, key: str) -> float:
    """Return a row's number in a column. Raises RowProblem."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RowProblem(f"{key!r} (data.curriculum.key) is {_kind(value)}, not a number")
    if not math.isfinite(value):
        raise RowProblem(f"{key!r} (data.curriculum.key) is {value}, not a finite number")
    return float(value)


def _check_unicode(*texts: tuple[str, str]) -> None:
    """Refuse half a surrogate pair, which JSON can spell and which no tokenizer or log file takes."""
    for key, text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RowProblem(f"{key!r} holds {text[error.start]!r}, half a surrogate pair") from error


def _messages(prompt: list[Any], prompt_key: str) -> list[dict[str, str]]:
    if not prompt:
        raise RowProblem(f"{prompt_key!r} is an empty list of messages")
    for number, message in enumerate(prompt, start=1):
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise RowProblem(f"message {number} of {prompt_key!r} is not an object with strings 'role' and 'content'")
    return prompt


def _render(messages: list[dict[str, str]], template: ChatTemplate) -> str:
    try:
        return template.render(messages)
    except (ValueError, jinja2.TemplateError) as error:
        raise RowProblem(f"the tokenizer's chat template refuses it: {one_line(error)}") from error


def _kind(value: object) -> str:
    """Return a value's type in JSON's words."""
    names = {type(None): "null", bool: "true or false", int: "a number", float: "a number", str: "a string"}
    names |= {list: "a list", dict: "an object"}
    return names.get(type(value), f"of type {type(value).__name__}")
