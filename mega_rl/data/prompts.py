"""Prompts: read from JSONL and Parquet files, checked row by row, tokenised, split, and served in order.

A JSONL file is read line by line here: Hugging Face `datasets` infers one schema for the whole file, fails on columns
that no setting names, and cannot say which line is at fault. Parquet goes through `datasets`.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jinja2

from mega_rl.data.chat import ChatTemplate
from mega_rl.data.columns import RewardColumns, RowColumns
from mega_rl.data.ordering import EPOCH, SPLIT, permutation
from mega_rl.data.source import RowSource
from mega_rl.errors import UserError, UserErrors, no_such
from mega_rl.types import Answer, Prompt

logger = logging.getLogger(__name__)

MAX_PROBLEMS_SHOWN = 20
TOKENIZER_BATCH = 1024  # texts handed to the tokenizer at once: enough to use its threads


class Tokenizer(Protocol):
    """Hugging Face tokenizer, as far as prompts need it."""

    def __call__(self, texts: list[str], *, add_special_tokens: bool) -> Mapping[str, Any]:
        """`{"input_ids": [[...], ...]}`, one list of ids per text."""
        ...

    def apply_chat_template(self, conversation: list[dict[str, str]], **settings: Any) -> Any:
        """Return the conversation as one string (with tokenize=False)."""
        ...


@dataclass(frozen=True)
class _PromptRow:
    """A readable row that is not tokenised yet."""

    where: str  # "train.jsonl:17"
    index: int  # row number over all files
    text: str  # what the reward function sees
    model_text: str  # what the model sees
    answer: Answer
    messages: tuple[tuple[str, str], ...]  # with a chat template alone
    columns: Mapping[str, Any] | None  # all of them, where the reward reads them
    source: str


class _RowProblem(Exception):
    """A row cannot be used; the message says why."""


def load_prompts(
    files: Sequence[str | Path] | RowSource,
    *,
    tokenizer: Tokenizer,
    vocab_size: int,
    columns: RowColumns,
    template: ChatTemplate | None = None,
    max_prompt_tokens: int,
    overlong: str = "error",
    malformed: str = "error",
) -> list[Prompt]:
    """Return every prompt of the files, in file and row order, or of a user's source, tokenised.

    A prompt is a string, or with a chat `template` also a list of messages {"role", "content"}; an answer is a string
    or a number, or whatever else `columns.reward` allows. Without a chat template the tokenizer adds its special tokens
    (such as a beginning-of-sequence token), with one the template has put them already. `Prompt.text` is the string as
    it stands in the file, or the content of the last message; `Prompt.messages` are all of them, or the string as a
    user's, with a chat template alone. `Prompt.index` numbers all rows of all files, dropped ones too; blank lines are
    no rows.

    Raises UserErrors that names file and line (row in a Parquet file, from 1) of every problem, 20 of them in full:
    unreadable files, rows that cannot be read (`malformed` "drop" drops these instead and logs how many), prompts above
    `max_prompt_tokens` (`overlong` likewise), token ids outside the model's vocabulary; and when no prompt is left.
    """
    if not files:
        raise UserError("no prompt files are given: set data.train_files to JSONL or Parquet files")
    fatal: list[str] = []
    bad: list[str] = []
    rows: list[_PromptRow] = []
    index = 0
    for where, content in _places(files, columns, fatal):
        try:
            rows.append(_parse(content, where, index, columns, template))
        except _RowProblem as problem:
            bad.append(f"{where}: {problem}")
        index += 1
    prompts, long = _tokenise(
        rows,
        tokenizer,
        add_special_tokens=template is None,
        max_tokens=max_prompt_tokens,
        vocab_size=vocab_size,
        fatal=fatal,
        bad=bad,
    )
    _report(fatal, bad, long, malformed=malformed, overlong=overlong)
    if not prompts:
        names = files.name if isinstance(files, RowSource) else ", ".join(map(str, files))
        raise UserError(f"{names}: no usable prompt is left of {index} rows")
    return prompts


def split(prompts: Sequence[Prompt], val_size: int, *, seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """Return (training, validation): `val_size` random prompts set apart, the same for the same seed; order is kept.

    Raises UserError when nothing would be left to train on.
    """
    if val_size >= len(prompts):
        raise UserError(f"data.val_size={val_size}: must be below the number of training prompts, {len(prompts)}")
    held_out = set(permutation(len(prompts), key=(seed, SPLIT))[:val_size])
    train = [prompt for position, prompt in enumerate(prompts) if position not in held_out]
    return train, [prompts[position] for position in sorted(held_out)]


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """Return the SHA-256 over content and order of the prompts (hex), by which a resumed run sees changed data."""
    digest = hashlib.sha256()
    for prompt in prompts:
        columns = [] if prompt.row is None else [prompt.row]
        content = [prompt.token_ids, prompt.text, prompt.answer, *columns, *filter(None, [prompt.source])]
        row = json.dumps(content, separators=(",", ":"), default=repr)  # Parquet has more types than JSON
        digest.update(row.encode() + b"\n")
    return digest.hexdigest()


class PromptSampler:
    """The prompts of each step, a pure function of the arguments and the step: resuming needs no state.

    Steps run through epoch after epoch without a gap: a batch may hold the end of one epoch and the beginning of the
    next, and with fewer prompts than `batch_size` a prompt more than once. With `shuffle` each epoch has its own order.
    """

    def __init__(self, prompts: Sequence[Prompt], *, batch_size: int, shuffle: bool, seed: int) -> None:
        assert prompts, "a sampler needs prompts"
        assert batch_size >= 1, f"batch_size={batch_size}"
        self._prompts = prompts
        self.num_prompts = len(prompts)  # of an epoch
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._order: tuple[int, list[int]] = (-1, [])  # the epoch last asked for, and its order

    def batch(self, step: int) -> list[Prompt]:
        """Return the prompts of one step, counted from 0."""
        assert step >= 0, f"step={step}"
        return self.take(self.drawn_after(step), self._batch_size)

    def drawn_after(self, done: int) -> int:
        """Return the number of prompts in the batches of the first `done` steps."""
        return done * self._batch_size

    def take(self, first: int, count: int) -> list[Prompt]:
        """Return `count` prompts from number `first` of the endless order on, counted from 0."""
        return [self._prompts[self._position(number)] for number in range(first, first + count)]

    def _position(self, number: int) -> int:
        epoch, offset = divmod(number, len(self._prompts))
        if not self._shuffle:
            return offset
        if self._order[0] != epoch:
            self._order = (epoch, permutation(len(self._prompts), key=(self._seed, EPOCH, epoch)))
        return self._order[1][offset]


def _places(
    files: Sequence[str | Path] | RowSource, columns: RowColumns, fatal: list[str]
) -> Iterator[tuple[str, object]]:
    """Yield (place, row) of every file, or of a source."""
    if isinstance(files, RowSource):
        yield from files.read(fatal)
        return
    for file in map(Path, files):
        yield from _read(file, columns, fatal)


def _read(file: Path, columns: RowColumns, fatal: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield (place, row) of one file, a _RowProblem for an unreadable row; problems of the file go to `fatal`."""
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
        fatal.append(f"{file}: cannot be read: {_one_line(error)}")
        return
    except UserError as error:
        fatal.append(str(error))
        return
    if empty:
        fatal.append(f"{file}: holds no rows")


def _one_line(error: Exception) -> str:
    """Return the error's text on one line; Arrow's and Jinja's have several."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(reason.split())


def _read_jsonl(file: Path, columns: RowColumns) -> Iterator[tuple[str, Any]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row: Any = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError as error:
                row = _RowProblem(f"is not UTF-8 (byte {error.start + 1} of the line)")
            except json.JSONDecodeError as error:
                row = _RowProblem(f"is not JSON: {error.msg} at column {error.colno}")
            except (ValueError, RecursionError) as error:  # numbers of thousands of digits, nesting without end
                row = _RowProblem(f"is not usable JSON: {error}")
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
        keys = dict.fromkeys((columns.prompt, columns.answer, columns.source))
        read = None if columns.reward.every else [key for key in keys if key in names]
        stream = datasets.load_dataset("parquet", data_files=str(file), split="train", streaming=True, columns=read)
        for number, row in enumerate(stream, start=1):
            yield f"{file}: row {number}", row
    except (pyarrow.ArrowException, datasets.exceptions.DatasetGenerationError) as error:
        raise UserError(f"{file}: is not a readable Parquet file: {_one_line(error)}") from error


def _parse(row: Any, where: str, index: int, columns: RowColumns, template: ChatTemplate | None) -> _PromptRow:
    """Return the row's prompt and answer. Raises _RowProblem."""
    prompt_key, answer_key = columns.prompt, columns.answer
    if isinstance(row, _RowProblem):
        raise row
    if not isinstance(row, dict):
        raise _RowProblem(f"is {_kind(row)}, not an object with {prompt_key!r} and {answer_key!r}")
    for key in columns.needed:
        if key not in row:
            raise _RowProblem(f"has no {key!r}; its keys are {', '.join(map(repr, row)) or 'none'}")
    answer = _answer(row.get(answer_key), answer_key, columns.reward)
    prompt = row[prompt_key]
    if isinstance(prompt, str):
        text, messages = prompt, [{"role": "user", "content": prompt}]
    elif isinstance(prompt, list):
        if template is None:
            raise _RowProblem(f"{prompt_key!r} is a list of messages, which needs data.chat.template=true")
        messages = _messages(prompt, prompt_key)
        text = messages[-1]["content"]
    else:
        raise _RowProblem(f"{prompt_key!r} is {_kind(prompt)}, not a string or a list of messages")
    if not text.strip():
        raise _RowProblem(f"{prompt_key!r} is empty")
    messages = [] if template is None else template.complete(messages)
    model_text = text if template is None else _render(messages, template)
    _check_unicode((prompt_key, model_text), (answer_key, json.dumps(answer, ensure_ascii=False)))
    return _PromptRow(
        where=where,
        index=index,
        text=text,
        model_text=model_text,
        answer=answer,
        messages=tuple((turn["role"], turn["content"]) for turn in messages),
        columns=row if columns.reward.every else None,
        source=columns.source_of(row),
    )


def _answer(value: Any, key: str, reward: RewardColumns) -> Answer:
    """Return a row's answer, a number as a string; None where there is none and none is needed. Raises _RowProblem."""
    if isinstance(value, str) or (value is None and not reward.answer):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if reward.structured and isinstance(value, (bool, list, dict)):
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:  # a date or bytes in a Parquet file
            raise _RowProblem(f"{key!r} holds something that JSON has no word for: {error}") from error
        return value
    legal = "a string, a number, a list or an object" if reward.structured else "a string or a number"
    raise _RowProblem(f"{key!r} is {_kind(value)}, not {legal}")


def _check_unicode(*texts: tuple[str, str]) -> None:
    """Refuse half a surrogate pair, which JSON can spell and which no tokenizer or log file takes."""
    for key, text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise _RowProblem(f"{key!r} holds {text[error.start]!r}, half a surrogate pair") from error


def _messages(prompt: list[Any], prompt_key: str) -> list[dict[str, str]]:
    if not prompt:
        raise _RowProblem(f"{prompt_key!r} is an empty list of messages")
    for number, message in enumerate(prompt, start=1):
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise _RowProblem(f"message {number} of {prompt_key!r} is not an object with strings 'role' and 'content'")
    return prompt


def _render(messages: list[dict[str, str]], template: ChatTemplate) -> str:
    try:
        return template.render(messages)
    except (ValueError, jinja2.TemplateError) as error:
        raise _RowProblem(f"the tokenizer's chat template refuses it: {_one_line(error)}") from error


def _kind(value: Any) -> str:
    """Return a value's type in JSON's words."""
    names = {type(None): "null", bool: "true or false", int: "a number", float: "a number", str: "a string"}
    names |= {list: "a list", dict: "an object"}
    return names.get(type(value), f"of type {type(value).__name__}")


def _tokenise(
    rows: Sequence[_PromptRow],
    tokenizer: Tokenizer,
    *,
    add_special_tokens: bool,
    max_tokens: int,
    vocab_size: int,
    fatal: list[str],
    bad: list[str],
) -> tuple[list[Prompt], list[str]]:
    """Return (prompts that fit, one line for each that is too long)."""
    prompts: list[Prompt] = []
    long: list[str] = []
    for first in range(0, len(rows), TOKENIZER_BATCH):
        chunk = rows[first : first + TOKENIZER_BATCH]
        encoded = tokenizer([row.model_text for row in chunk], add_special_tokens=add_special_tokens)["input_ids"]
        for row, ids in zip(chunk, encoded, strict=True):
            if not ids:
                bad.append(f"{row.where}: the prompt has no tokens")
            elif max(ids) >= vocab_size:
                fatal.append(
                    f"{row.where}: token id {max(ids)} is outside the model's vocabulary of {vocab_size}: "
                    "the tokenizer does not belong to this model"
                )
            elif len(ids) > max_tokens:
                long.append(f"{row.where}: the prompt has {len(ids)} tokens, above data.max_prompt_tokens={max_tokens}")
            else:
                prompts.append(
                    Prompt(
                        index=row.index,
                        token_ids=tuple(ids),
                        text=row.text,
                        answer=row.answer,
                        messages=row.messages,
                        row=row.columns,
                        source=row.source,
                    )
                )
    return prompts, long


def _report(fatal: list[str], bad: list[str], long: list[str], *, malformed: str, overlong: str) -> None:
    """Log the dropped rows, and raise for the other problems."""
    problems = list(fatal)
    for lines, policy, key in ((bad, malformed, "data.malformed_rows"), (long, overlong, "data.overlong_prompts")):
        if not lines:
            continue
        if policy == "error":
            problems += lines
        else:
            logger.warning("%s=drop: %d rows are dropped, the first is %s", key, len(lines), lines[0])
    if not problems:
        return
    shown = problems[:MAX_PROBLEMS_SHOWN]
    if len(problems) > len(shown):
        shown.append(f"... and {len(problems) - len(shown)} more")
    hints = [
        f"set {key}=drop to go on without them"
        for lines, policy, key in ((bad, malformed, "data.malformed_rows"), (long, overlong, "data.overlong_prompts"))
        if lines and policy == "error" and not fatal
    ]
    raise UserErrors([*shown, *hints])
