"""Rows of files and of a user's source: read, checked and rendered as text.

A JSONL file is read line by line: Hugging Face `datasets` infers one schema for the whole file, fails on columns that
no setting names, and cannot say which line is at fault.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mega_rl.data.chat import ChatTemplate, TemplateRefusal, Tokenizer
from mega_rl.data.columns import (
    RewardColumns,
    RowColumns,
    RowProblem,
    conversation,
    kind_of,
    template_columns,
)
from mega_rl.errors import UserError, no_such
from mega_rl.types import Answer, Prompt

if TYPE_CHECKING:
    import pyarrow

BATCH_ROWS = 1024  # rows of a Parquet file decoded at once
MAX_ROWS = 10_000_000  # rows of a user's source; one that yields more is taken for endless


@dataclass(frozen=True)
class DataContext:
    """Parts of a run for a user's data source, the same on every rank."""

    split: Literal["train", "validation"]
    seed: int  # trainer.seed
    tokenizer: Tokenizer  # the actor's


@dataclass(frozen=True)
class RowSource:
    """Rows of a user's data source, read once; each time they must be the same."""

    name: str  # the setting that chose it, with the split: "data.source='sums.py:Sums' (train)"
    rows: Iterable[object]

    def read(self, fatal: list[str]) -> Iterator[tuple[str, object]]:
        """Yield (place, row); a problem of the source as a whole goes to `fatal`."""
        number = 0
        for number, row in enumerate(self.rows, start=1):
            if number > MAX_ROWS:
                fatal.append(f"{self.name}: yields more than {MAX_ROWS:,} rows; let it end")
                return
            yield f"{self.name}: row {number}", row
        if not number:
            fatal.append(f"{self.name}: yields no rows")


Text = tuple[str, bool]  # a text, and whether it is plain: no template has put special tokens


@dataclass(frozen=True)
class PromptRow:
    """A readable row that is not tokenised yet."""

    where: str  # "train.jsonl:17"
    prompt: Prompt  # without its tokens
    model_text: str  # the model sees it
    unread: frozenset[str]  # columns for the chat template that the prompt does not show

    @property
    def texts(self) -> list[Text]:
        """Return the texts whose token ids make the row's."""
        return [(self.model_text, not self.prompt.messages)]


def read_rows(
    files: Sequence[str | Path] | RowSource, columns: RowColumns, fatal: list[str]
) -> Iterator[tuple[str, object]]:
    """Yield (place, row) of every file, or of a source, a RowProblem for an unreadable row."""
    if isinstance(files, RowSource):
        yield from files.read(fatal)
        return
    for file in map(Path, files):
        if file.suffix not in (".jsonl", ".parquet"):
            fatal.append(f"{file}: unknown suffix {file.suffix!r}: prompt files are .jsonl or .parquet")
            continue
        if not file.is_file():
            fatal.append(f"{file}: {'is a folder, not a file' if file.is_dir() else no_such('file', file)}")
            continue
        empty = True
        try:
            for place in read_parquet(file, columns) if file.suffix == ".parquet" else read_jsonl(file):
                empty = False
                yield place
        except OSError as error:
            fatal.append(f"{file}: cannot be read: {one_line(error)}")
        except UserError as error:
            fatal.append(str(error))
        else:
            if empty:
                fatal.append(f"{file}: holds no rows")


def one_line(error: Exception) -> str:
    """Return the error's text on one line; Arrow's and Jinja's have several."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(reason.split())


def read_jsonl(file: Path, *, skip: int = 0) -> Iterator[tuple[str, object]]:
    """Yield (place, row or RowProblem) of a JSONL file from row `skip` on."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            if skip:
                skip -= 1
                continue
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                row: object = json.loads(text, object_pairs_hook=_object)
            except UnicodeDecodeError as error:
                row = RowProblem(f"is not UTF-8 (byte {error.start + 1} of the line)")
            except json.JSONDecodeError as error:
                row = RowProblem(f"is not JSON: {error.msg} at column {error.colno}")
            except (ValueError, RecursionError) as error:  # numbers of thousands of digits, nesting without end
                row = RowProblem(f"is not usable JSON: {error}")
            yield f"{file}:{number}", row


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return a JSON object. Raises ValueError for a key that it has twice."""
    members = dict(pairs)
    if len(members) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} stands in it twice")
    return members


def read_parquet(file: Path, columns: RowColumns, *, skip: int = 0) -> Iterator[tuple[str, object]]:
    """Yield (place, row) of a Parquet file from row `skip` on, with the columns to read."""
    from pyarrow import ArrowException, parquet

    try:
        with parquet.ParquetFile(file, memory_map=True) as table:
            names = table.schema_arrow.names
            if missing := [key for key in columns.needed if key not in names]:
                raise UserError(f"{file}: has no column {', '.join(missing)}; its columns are {', '.join(names)}")
            before, first = 0, 0  # rows of earlier row groups, first row group with rows from `skip` on
            while first < table.num_row_groups and before + table.metadata.row_group(first).num_rows <= skip:
                before += table.metadata.row_group(first).num_rows
                first += 1
            groups = list(range(first, table.num_row_groups))
            batches = table.iter_batches(BATCH_ROWS, row_groups=groups, columns=columns.read_of(names))
            rows = (row for batch in batches for row in batch.to_pylist())
            for number, row in enumerate(islice(rows, skip - before, None), start=skip + 1):
                yield f"{file}: row {number}", with_short_floats(row, columns.answer, table.schema_arrow)
    except (ArrowException, OverflowError) as error:  # OverflowError: a date beyond Python's
        raise UserError(f"{file}: is not a readable Parquet file: {one_line(error)}") from error


def with_short_floats(row: dict[str, Any], key: str, schema: pyarrow.Schema) -> dict[str, object]:
    """Return a row with short decimals for float32 and float16 in column `key`: 0.1 stays 0.1."""
    if key in row and key in schema.names:
        row[key] = _short_float(row[key], schema.field(key).type)
    return row


def _short_float(value: Any, kind: pyarrow.DataType) -> object:
    from pyarrow import types

    if value is None:
        return None
    if types.is_float32(kind) or types.is_float16(kind):
        return float(str(kind.to_pandas_dtype()(value)))
    if types.is_struct(kind):
        return {field.name: _short_float(value[field.name], field.type) for field in kind}
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return [_short_float(item, kind.value_type) for item in value]
    return value


def parse_row(row: object, where: str, index: int, columns: RowColumns, template: ChatTemplate | None) -> PromptRow:
    """Return the row's prompt and answer. Raises RowProblem."""
    prompt_key, answer_key = columns.prompt, columns.answer
    if isinstance(row, RowProblem):
        raise row
    if not isinstance(row, dict):
        raise RowProblem(f"is {kind_of(row)}, not an object with {prompt_key!r} and {answer_key!r}")
    for key in columns.needed:
        if key not in row:
            raise RowProblem(f"has no {key!r}; its keys are {', '.join(map(repr, row)) or 'none'}")
    answer = _answer(row.get(answer_key), answer_key, columns.reward)
    given = row[prompt_key]
    if isinstance(given, str):
        messages = [{"role": "user", "content": given}]
    elif isinstance(given, list):
        if template is None:
            need = "data.chat.template=true or auto, and a tokenizer that has a chat template"
            raise RowProblem(f"{prompt_key!r} is a list of messages, which needs {need}")
        messages = conversation(given, prompt_key)
    else:
        raise RowProblem(f"{prompt_key!r} is {kind_of(given)}, not a string or a list of messages")
    text = messages[-1]["content"]
    if not text.strip():
        raise RowProblem(f"{prompt_key!r} is empty")
    variables = template_columns(row)
    if template is None or not (template.of_strings or isinstance(given, list)):
        messages, model_text, unread = [], text, frozenset(variables)
    else:
        messages = template.complete(messages)
        unread = template.unread(variables)
        try:
            model_text = template.render(messages, variables)
        except TemplateRefusal as error:
            raise RowProblem(f"the tokenizer's chat template refuses it: {error}") from error
    check_unicode({prompt_key: model_text, answer_key: json.dumps(answer, ensure_ascii=False)})
    prompt = Prompt(
        index,
        token_ids=(),
        text=text,
        answer=answer,
        messages=tuple((turn["role"], turn["content"] or "") for turn in messages),
        row=row if columns.reward.every else None,
        source=columns.source_of(row),
    )
    return PromptRow(where, prompt, model_text, unread)


def check_unicode(texts: Mapping[str, str]) -> None:
    """Raise RowProblem for half a surrogate pair, which JSON can spell and no tokenizer takes."""
    for key, text in texts.items():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RowProblem(f"{key!r} holds {text[error.start]!r}, half a surrogate pair") from error


def _answer(value: object, key: str, reward: RewardColumns) -> Answer:
    """Return a row's answer, a number as a string; None without a needed answer. Raises RowProblem."""
    if isinstance(value, str) or (value is None and not reward.answer):
        return value
    if isinstance(value, (int, float, Decimal)) and not isinstance(value, bool):
        number = Decimal(str(value)) if isinstance(value, float) else Decimal(value)
        if not number.is_finite():
            raise RowProblem(f"{key!r} is {value}, not a finite number")
        text = f"{number:f}" if number else "0"
        return text.rstrip("0").rstrip(".") if "." in text else text
    if reward.structured and isinstance(value, (bool, list, dict)):
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:  # a date or bytes in a Parquet file, NaN
            raise RowProblem(f"{key!r} holds something that JSON has no word for: {error}") from error
        return value
    legal = "a string, a number, a list or an object" if reward.structured else "a string or a number"
    raise RowProblem(f"{key!r} is {kind_of(value)}, not {legal}")
